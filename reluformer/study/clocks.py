"""The time that cells take over several starts, added to their outcomes."""

from dataclasses import replace
from pathlib import Path

from reluformer.errors import UserError
from reluformer.reading import SETTINGS_LIMIT, read_text
from reluformer.study.cells import load_outcome
from reluformer.study.queue import JobQueue


def add_clocks(queue: JobQueue, root: Path) -> None:
    """Add the time of cells that do not run now to their outcomes, or keep it if they go on.

    Args:
        queue: The queue that ran the cells.
        root: Folder of the cells.
    """
    for name, clock in queue.collect_clocks().items():
        folder = root / name
        outcome = load_outcome(folder)
        path = root / "logs" / f"{name}.seconds"
        earlier = _read_seconds(path)
        seconds = earlier[0] + clock.seconds, earlier[1] + clock.device_seconds
        if outcome is None:
            path.write_text(f"{seconds[0]} {seconds[1]}\n")
        else:
            path.unlink(missing_ok=True)
            replace(
                outcome, seconds=round(seconds[0], 1), device_seconds=round(seconds[1], 1)
            ).save(folder)


def _read_seconds(path: Path) -> tuple[float, float]:
    """Seconds and device seconds of a cell's earlier starts."""
    if not path.is_file():
        return 0.0, 0.0
    try:
        seconds, device_seconds = map(float, read_text(path, SETTINGS_LIMIT).split())
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return seconds, device_seconds
