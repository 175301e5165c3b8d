"""Errors that the command line reports in one line, without a traceback."""

from collections.abc import Mapping


class UserError(ValueError):
    """Invalid input: one sentence with the argument, its value and what is allowed.

    The command line exits with status 2.
    """


class Diverged(RuntimeError):
    """Training diverged by `step`. The command line exits with status 3."""

    def __init__(self, step: int, reason: str, attention: Mapping[str, object]) -> None:
        """Build the message from the reason and the statistics of attention by site."""
        statistics = "".join(f" | {site} {values}" for site, values in attention.items())
        super().__init__(f"training diverged by step {step}: {reason}{statistics}")
        self.step = step
