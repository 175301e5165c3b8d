"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Reporter(Protocol):
    """Receives what happens."""

    def say(self, text: str) -> None:
        """A line to read."""

    def advance(self, step: int) -> None:
        """Step number `step` is done."""


class Silent:
    """Tells nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def advance(self, step: int) -> None:
        """Nothing."""


class Plain:
    """Lines on standard error, flushed."""

    def say(self, text: str) -> None:
        """Print the line."""
        print(text, file=sys.stderr, flush=True)

    def advance(self, step: int) -> None:
        """Nothing: lines come at the logging steps."""


class Bar:
    """A bar at the bottom of a terminal, lines above it."""

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    def say(self, text: str) -> None:
        """Print the line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)


@contextmanager
def reporter(steps: int, *, speaks: bool = True) -> Iterator[Reporter]:
    """The reporter that suits where standard error goes."""
    if not speaks:
        yield Silent()
    elif not sys.stderr.isatty():
        yield Plain()
    else:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            yield Bar(progress, progress.add_task("training", total=steps))
