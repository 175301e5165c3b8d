"""Metrics of a run: `metrics.jsonl` and, optionally, TensorBoard."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reluformer.errors import UserError
from reluformer.files import write_text
from reluformer.reading import LOG_LIMIT, read_text


class Metrics:
    """Writes one JSON line for each logged step; a resumed run does not repeat steps."""

    def __init__(self, path: Path, *, after: int, tensorboard: bool = False) -> None:
        """Open `path` and drop lines after step `after`, which a killed run may have written.

        Args:
            path: The file `metrics.jsonl`.
            after: Step of the checkpoint from which the run resumes.
            tensorboard: Also write TensorBoard events, into `tensorboard/` beside the file.
        """
        if path.is_file():
            write_text(path, "".join(_lines_until(path, after)))
        self._path = path
        self._board = _tensorboard(path.parent, after) if tensorboard else None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record: the field `step` and further numbers, which may be nested."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self._board is not None:
            for name, value in _numbers(record):
                self._board.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        """Flush all lines to the disk."""
        with self._path.open("ab") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the TensorBoard writer."""
        if self._board is not None:
            self._board.close()


def _lines_until(path: Path, step: int) -> list[str]:
    kept = []
    for line in read_text(path, LOG_LIMIT).splitlines(keepends=True):
        try:
            recorded = int(json.loads(line)["step"])
        except (ValueError, LookupError, TypeError, RecursionError):
            # A killed run may leave an incomplete last line.
            break
        if recorded > step or not line.endswith("\n"):
            break
        kept.append(line)
    return kept


def _numbers(record: Mapping[str, Any], parent: str = "") -> list[tuple[str, float]]:
    numbers = []
    for key, value in record.items():
        name = f"{parent}/{key}" if parent else key
        if isinstance(value, Mapping):
            numbers += _numbers(value, name)
        elif isinstance(value, (int, float)) and name != "step":
            numbers.append((name, float(value)))
    return numbers


def _tensorboard(folder: Path, after: int) -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise UserError(
            "train.tensorboard is true, but tensorboard is not installed; install the extra "
            "reluformer[track] or set it to false"
        ) from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)
