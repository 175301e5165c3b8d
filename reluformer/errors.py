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


def shorten(value: object) -> str:
    """Text of a value, shortened to fit a sentence."""
    try:
        text = " ".join(str(value).splitlines())
    except ValueError:
        # Python does not print whole numbers of more than 4300 digits.
        return "a number of more than 4300 digits"
    return text if len(text) <= 80 else f"{text[:40]}...{text[-20:]}"


def quote(value: object) -> str:
    """Like `shorten`, with quotes around text."""
    return shorten(repr(value) if isinstance(value, str) else value)
