"""Progress of a run on standard error: a bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn


class Reporter(Protocol):
    """Shows messages and progress."""

    def show(self, text: str) -> None:
        """Show a line of text."""

    def advance(self, step: int) -> None:
        """Show that step number `step` is done."""


class Silent:
    """Shows nothing."""

    def show(self, text: str) -> None:
        """Do nothing."""

    def advance(self, step: int) -> None:
        """Do nothing."""


class Plain:
    """Prints lines on standard error."""

    def show(self, text: str) -> None:
        """Print the line."""
        print(text, file=sys.stderr, flush=True)

    def advance(self, step: int) -> None:
        """Do nothing: lines are printed at logging steps."""


class Bar:
    """Shows a progress bar at the bottom of a terminal, and lines above it."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def show(self, text: str) -> None:
        """Print the line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, emoji=False)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)


@contextmanager
def reporter(steps: int, *, enabled: bool = True) -> Iterator[Reporter]:
    """A bar if standard error is a terminal, else plain lines; silent unless `enabled`."""
    if not enabled:
        yield Silent()
    elif not sys.stderr.isatty():
        yield Plain()
    else:
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            yield Bar(progress, progress.add_task("training", total=steps))
