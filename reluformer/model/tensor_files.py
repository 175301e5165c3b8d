"""Files of tensors: safetensors, written atomically and read with checks."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from reluformer.errors import UserError
from reluformer.files import atomic_path
from reluformer.reading import JSON_LIMIT, open_regular, parse_json


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn failures of safetensors to write into an `OSError` that names `path`."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from None


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors by name, atomically, with the default permissions of new files."""
    with atomic_path(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        with write_errors(path):
            save_file(tensors, partial)
        # safetensors replaces the file by one that only its owner can read.
        partial.chmod(mode)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a file by name, on the CPU."""
    tensor_shapes(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError, LookupError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


class TensorHeader(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str
    """Name in the format safetensors, such as `F32` or `I8`."""
    shape: list[int]


class TensorFile(Mapping[str, Tensor]):
    """Tensors of a safetensors file by name, each read when it is looked up.

    Raises:
        UserError: The file is missing or damaged.
    """

    WINDOW = 2 * 2**20
    """Bytes after which the file is mapped anew. Pages of a mapping that were read occupy memory
    as long as the mapping exists."""

    def __init__(self, path: Path) -> None:
        self.path, self.headers = path, tensor_headers(path)
        self._file: Any = None
        self._bytes_read = self.WINDOW

    def __getitem__(self, name: str) -> Tensor:
        shape = self.headers[name].shape
        try:
            if self._bytes_read >= self.WINDOW:
                self._file, self._bytes_read = safe_open(self.path, framework="pt"), 0
            tensor: Tensor = self._file.get_tensor(name)
        except (OSError, SafetensorError, LookupError) as error:
            raise UserError(f"{self.path} cannot be read: {error}") from None
        if [*tensor.shape] != shape:
            raise UserError(f"{self.path} cannot be read: it changed while it was read")
        self._bytes_read += tensor.nbytes
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Shapes of the tensors of a safetensors file by name, from its header."""
    return {name: header.shape for name, header in tensor_headers(path).items()}


def tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Types and shapes of the tensors of a safetensors file by name, from its header."""
    if not path.exists():
        raise UserError(f"{path} is missing")
    with open(open_regular(path), "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(JSON_LIMIT, path.stat().st_size):
            raise UserError(f"{path} cannot be read: its header has an impossible length")
        header = parse_json(file.read(size), path)
    headers: dict[str, TensorHeader] = {}
    entries = header.items() if isinstance(header, dict) else [("", None)]
    for name, entry in entries:
        if name == "__metadata__":
            continue
        fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
        shape = fields.get("shape")
        if not isinstance(shape, list) or not all(type(length) is int for length in shape):
            raise UserError(f"{path} cannot be read: its header is damaged")
        headers[name] = TensorHeader(str(fields.get("dtype")), shape)
    return headers
