"""Terminal output of commands: progress, tables and one-line errors."""

import errno
import functools
import logging
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import TyperPath

from reluformer.errors import Diverged, UserError

P = ParamSpec("P")
R = TypeVar("R")

# Exit statuses besides 0.
FAILURE, MISTAKE, DIVERGED, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141

# Mistakes in options and arguments, which Typer finds.
_USAGE_ERRORS = typer.BadParameter.__bases__

# Errors of writing to standard output, which name no file.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

# Seconds before progress is shown, and between lines of progress without a terminal.
_PATIENCE, _PLAIN_EVERY = 2.0, 15.0
# Seconds after which a delayed interruption is delivered again.
_IMPORT_POLL = 0.05
# Width of output that is not shown on a terminal, and of the space between columns of a table.
_UNLIMITED, _COLUMN_GAP = 10_000, 2


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command: every failure prints one line on standard error and sets the exit status.

    With the environment variable RELUFORMER_DEBUG set, failures keep their traceback.
    """

    @functools.wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        _log_to_stderr()
        try:
            with _interrupts_after_imports():
                result = command(*arguments, **options)
                sys.stdout.flush()
            return result
        # These end the process in their own way.
        except (SystemExit, typer.Exit, typer.Abort):
            raise
        except BaseException as error:
            if os.environ.get("RELUFORMER_DEBUG"):
                raise
            _exit(error)

    return run


class FileCommand(TyperCommand):
    """A command that refuses a repeated option of files, of which the last would count."""

    def make_parser(self, ctx: Any) -> Any:
        """The parser of the arguments."""
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_once(args: list[str]) -> Any:
            options, rest, order = parse(args=args)
            for option in order:
                names_files = option.nargs == 2 or isinstance(option.type, TyperPath)
                if names_files and not option.multiple and order.count(option) > 1:
                    raise UserError(f"{option.opts[0]} must be given once")
            return options, rest, order

        parser.parse_args = parse_once  # type: ignore[method-assign]
        return parser


class CommandGroup(TyperGroup):
    """Commands whose mistaken options, and failures outside a command, are one line, too."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Parse the arguments, run the command, and exit unless `standalone_mode` is false."""
        standalone = options.pop("standalone_mode", True)
        _replace_closed_streams()
        try:
            status = super().main(*arguments, **{**options, "standalone_mode": False})
            if not standalone:
                return status
            # Help and versions are printed outside commands.
            sys.stdout.flush()
        except BaseException as error:
            is_debugging = bool(os.environ.get("RELUFORMER_DEBUG"))
            if not standalone or is_debugging or isinstance(error, SystemExit):
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                # Without a command, all commands are listed.
                cast(Any, error).show()
                sys.exit(MISTAKE)
            _exit(error)
        sys.exit(status if isinstance(status, int) else 0)


def _exit(error: BaseException) -> NoReturn:
    """Print one line about a failure, unless the reader of the output has left, and exit."""
    message, status = _describe_failure(error)
    if status != BROKEN_PIPE:
        print(f"reluformer: {_printable(message)}", file=sys.stderr, flush=True)
    sys.exit(status)


def _printable(text: str) -> str:
    """One line with control characters escaped: messages may quote files and arguments."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _describe_failure(error: BaseException) -> tuple[str, int]:
    """One sentence about a failure, and the exit status."""
    if isinstance(error, UserError):
        return str(error), MISTAKE
    if isinstance(error, _USAGE_ERRORS):
        return _describe_usage(error), MISTAKE
    if isinstance(error, Diverged):
        return str(error), DIVERGED
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader of our output has exited. Python must not fail when it flushes the rest.
        _drop_output()
        return "", BROKEN_PIPE
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be used: {error.strerror}", MISTAKE
    if isinstance(error, OSError) and error.errno in _OUTPUT_ERRORS:
        # The buffered rest of standard output cannot be written either.
        _drop_output()
        closed = "standard output is closed"
        return closed if error.errno == errno.EBADF else str(error.strerror), MISTAKE
    if _is_out_of_memory(error):
        return "out of memory; a smaller model, batch or input needs less", FAILURE
    reason = " ".join(str(error).split())[:300]
    return (
        f"unexpected {type(error).__name__}: {reason or 'no message'}; this is a bug, please "
        "report it with the traceback that RELUFORMER_DEBUG=1 shows",
        FAILURE,
    )


def _describe_usage(error: Any) -> str:
    """The sentence of a mistaken option, with the command that lists the options."""
    message = str(error.format_message()).removesuffix(".")
    path = "reluformer" if error.ctx is None else error.ctx.command_path
    return f"{message[:1].lower()}{message[1:]}; see {path} --help"


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, numpy or torch could not allocate memory."""
    texts = ("can't allocate memory", "not enough memory", "out of memory")
    is_torch = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return isinstance(error, MemoryError) or is_torch


@contextmanager
def _interrupts_after_imports() -> Iterator[None]:
    """Delay interruptions that arrive during an import until the import has finished.

    Packages that are interrupted while they are imported may ignore it or raise another error. A
    second interruption during the import exits at once.
    """
    delayed: threading.Timer | None = None

    def interrupt_again() -> None:
        nonlocal delayed
        delayed = None
        os.kill(os.getpid(), signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal delayed
        if not _is_importing(frame):
            signal.default_int_handler(number, frame)
        if delayed is not None:
            print("reluformer: interrupted", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        delayed = threading.Timer(_IMPORT_POLL, interrupt_again)
        delayed.daemon = True
        delayed.start()

    # Background jobs ignore interruptions, and only the main thread may set handlers.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
        if delayed is not None:
            # The block ended before the delayed interruption was delivered.
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if delayed is not None:
            delayed.cancel()


def _is_importing(frame: FrameType | None) -> bool:
    """Whether `frame` or one of its callers runs an import."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _replace_closed_streams() -> None:
    """Open the null device in place of standard streams that are closed, as by `>&-`.

    A file that is opened later would get the descriptor and receive their text. Writing to standard
    output still fails.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR if name == "stderr" else os.O_RDONLY)
            if null != number:
                os.dup2(null, number)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))


def _drop_output() -> None:
    """Redirect standard output to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _log_to_stderr() -> None:
    """Print the package's log messages as plain lines on standard error."""
    log = logging.getLogger("reluformer")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("reluformer: %(levelname)s: %(message)s"))
        logging.addLevelName(logging.WARNING, "warning")
        log.addHandler(handler)


class Progress:
    """Progress on standard error: a bar on a terminal, plain lines elsewhere.

    Nothing is shown for work of less than two seconds.
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self._start = time.monotonic()
        self._last_line = self._start + _PATIENCE - _PLAIN_EVERY
        self._bar: Any = None
        self._task: Any = None

    def update(self, done: int, total: int | None, doing: str) -> None:
        """Show that `done` of `total` units are finished, and the current activity."""
        now = time.monotonic()
        if now - self._start < _PATIENCE:
            return
        if sys.stderr.isatty():
            self._draw(done, total, doing)
        elif now - self._last_line >= _PLAIN_EVERY:
            self._last_line = now
            of = "" if total is None else f" of {total:,}"
            print(f"{doing}: {done:,}{of} {self.unit}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _draw(self, done: int, total: int | None, doing: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            # The description may name a file.
            description = TextColumn("{task.description}", markup=False)
            columns = (description, BarColumn(), MofNCompleteColumn())
            unit = TextColumn(self.unit)
            console = Console(stderr=True)
            self._bar = Bar(*columns, unit, TimeElapsedColumn(), console=console, transient=True)
            self._task = self._bar.add_task(doing, total=total)
            self._bar.start()
        self._bar.update(self._task, description=doing, completed=done, total=total)


@contextmanager
def progress(unit: str) -> Iterator[Progress]:
    """Yield a progress display and remove it at the end of the block."""
    display = Progress(unit)
    try:
        yield display
    finally:
        display.close()


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; the first column is text, the others are numbers.

    In a narrow terminal, cells are wrapped between words. Output that does not go to a terminal is
    as wide as the table.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    available = _columns_of_output()
    widths = _column_widths(columns, rows, available)
    total = max(available, sum(widths) + _COLUMN_GAP * len(widths))
    # Cells may be names of files, in which brackets and colons mean nothing.
    console = Console(width=total, markup=False, emoji=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(column, justify="right" if index else "left", width=width)
    for row in rows:
        table.add_row(*row)
    if title:
        print(title)
    console.print(table)
    print()


def print_definitions(texts: Mapping[str, str]) -> None:
    """Print names and their texts in two columns; in a terminal, long texts are wrapped."""
    width = max(map(len, texts)) + _COLUMN_GAP
    columns = max(_columns_of_output(), 2 * width)
    for name, text in texts.items():
        print(
            textwrap.fill(
                text,
                columns,
                initial_indent=f"{name:{width}}",
                subsequent_indent=" " * width,
            )
        )


def _columns_of_output() -> int:
    """Width of the terminal; files and pipes have no limit."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return _UNLIMITED
    return shutil.get_terminal_size().columns


def _column_widths(columns: list[str], rows: list[list[str]], available: int) -> list[int]:
    """Widths of columns that are as narrow as `available` needs, and keep words whole."""
    # Some characters take two columns of a terminal.
    from rich.cells import cell_len

    # Rows may be shorter than the header.
    texts = list(zip_longest(columns, *rows, fillvalue=""))
    widths = [max(map(cell_len, cells)) for cells in texts]
    longest_words = [max(map(cell_len, " ".join(cells).split()), default=0) for cells in texts]
    # The entries of the first column stay on one line.
    least = [widths[0], *longest_words[1:]]
    while sum(widths) + _COLUMN_GAP * len(widths) > available and widths != least:
        wrappable = [index for index in range(len(widths)) if widths[index] > least[index]]
        widths[max(wrappable, key=widths.__getitem__)] -= 1
    return widths
