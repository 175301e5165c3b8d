"""BLEU counts of translated test sets by segment.

Counts are all that comparisons of systems need, so results can be kept and compared without the
text of a corpus.
"""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reluformer.errors import UserError
from reluformer.evaluation.results import Level
from reluformer.files import atomic_path

SUFFIX = ".counts.npz"

# sacreBLEU's counts of a segment: length, reference length, 4 matches, 4 totals.
_COLUMNS = 10


# Errors of numpy for files that are empty, cut or changed.
_READ_ERRORS = (
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


class Counts(NamedTuple):
    """BLEU counts of one translated test set at one level."""

    table: np.ndarray[Any, np.dtype[np.int64]]
    """[segments, 10]."""
    signature: str
    """Signature of sacreBLEU."""


def save_counts(folder: Path, test: str, counts: Mapping[Level, Counts]) -> None:
    """Write the counts of a test set into the folder of its cell."""
    arrays: dict[str, Any] = {level: each.table.astype(np.int32) for level, each in counts.items()}
    (signature,) = {each.signature for each in counts.values()}
    # numpy adds an ending to names, and none to open files.
    with atomic_path(folder / f"{test}{SUFFIX}") as partial, open(partial, "wb") as file:
        np.savez_compressed(file, signature=np.array(signature), **arrays)


def load_counts(folder: Path, test: str, level: Level) -> Counts | None:
    """The counts of a cell's test set; None if they were not written."""
    path = folder / f"{test}{SUFFIX}"
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if level not in arrays:
                return None
            counts = Counts(arrays[level].astype(np.int64), str(arrays["signature"]))
    except _READ_ERRORS as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if counts.table.ndim != 2 or counts.table.shape[1] != _COLUMNS:
        raise UserError(f"{path} is damaged: counts have shape {counts.table.shape}")
    return counts
