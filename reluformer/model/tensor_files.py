"""Files of tensors: safetensors, written atomically and read with checks."""

import errno
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from reluformer.errors import UserError
from reluformer.files import atomic_path
from reluformer.reading import JSON_LIMIT, open_regular, parse_json


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors by name, atomically, with the default permissions of new files."""
    with atomic_path(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        try:
            save_file(tensors, partial)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(path)) from None
        # safetensors replaces the file by one that only its owner can read.
        partial.chmod(mode)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a file by name, on the CPU."""
    tensor_shapes(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError, LookupError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Shapes of the tensors of a safetensors file by name, from its header."""
    if not path.exists():
        raise UserError(f"{path} is missing")
    with open(open_regular(path), "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(JSON_LIMIT, path.stat().st_size):
            raise UserError(f"{path} cannot be read: its header has an impossible length")
        header = parse_json(file.read(size), path)
    shapes: dict[str, list[int]] = {}
    entries = header.items() if isinstance(header, dict) else [("", None)]
    for name, entry in entries:
        if name == "__metadata__":
            continue
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or not all(type(length) is int for length in shape):
            raise UserError(f"{path} cannot be read: its header is damaged")
        shapes[name] = shape
    return shapes
