"""Models on disk in int8: safetensors shards of rows with scales, beside `config.json`.

A table `NAME` [n, m] is stored as `NAME` in int8 and `NAME.scale` [n] in float32. All other
parameters are float32. A shard has less than 16 MB, so that a model can be kept in a repository.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.model.int8 import LARGEST, Int8Rows, quantise
from reluformer.model.tensor_files import TensorFile, TensorHeader, write_tensors

Parameter: TypeAlias = Tensor | Int8Rows
"""Value of a parameter of a model: a tensor, or a table in int8."""

SHARD_BYTES = 15 * 2**20
"""Largest size of the tensors of a shard."""
MAX_SHARDS = 1000
_SCALE = ".scale"
_NAME = re.compile(r"int8-[0-9]{1,4}\.safetensors")


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Write parameters, tables of weights in int8; return the names of the files.

    Raises:
        UserError: A table holds numbers that are not finite, or is larger than a shard.
    """
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        for part in _parts(name, tensor):
            size = sum(value.nbytes for value in part.values())
            if filled + size > SHARD_BYTES and shards[-1]:
                shards.append({})
                filled = 0
            shards[-1].update(part)
            filled += size
    names = [f"int8-{number}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_tensors(folder / name, shard)
    return names


class Int8Shards(Mapping[str, Parameter]):
    """Parameters of shards by name, each read and checked when it is looked up.

    Args:
        folder: Folder of the model.
        names: Names of the files, as in `config.json`.

    Raises:
        UserError: A file is missing or damaged, or has an impossible name.
    """

    def __init__(self, folder: Path, names: Any) -> None:
        self.folder = folder
        self._files: dict[str, TensorFile] = {}
        for file in _open_shards(folder, names):
            for key in file:
                if key in self._files:
                    raise UserError(f"{file.path} holds {key!r}, which another file holds too")
                self._files[key] = file
        self.shapes: dict[str, list[int]] = {}
        """Shapes of the parameters by name."""
        self._blocks: dict[str, list[str]] = {}
        """Names of the stored blocks of rows of each table, in order."""
        self._group()

    def __getitem__(self, name: str) -> Parameter:
        if name not in self._blocks:
            return self._files[name][name]
        blocks = [self._block(stored) for stored in self._blocks[name]]
        if len(blocks) == 1:
            return blocks[0]
        return Int8Rows(*(torch.cat(part) for part in zip(*blocks, strict=True)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _header(self, key: str) -> TensorHeader:
        return self._files[key].headers[key]

    def _group(self) -> None:
        """Collect the blocks of rows of each table, and the shapes of all parameters."""
        starts: dict[str, dict[int, str]] = {}
        for key in self._files:
            dtype, shape = self._header(key)
            if dtype == "I8":
                match = re.fullmatch(r"(.*)\[([0-9]{1,12})\]", key)
                name, first = (key, 0) if match is None else (match[1], int(match[2]))
                if first in starts.setdefault(name, {}):
                    raise UserError(f"{self.folder} does not hold all rows of {name!r} once")
                starts[name][first] = key
            elif not key.endswith(_SCALE):
                if dtype != "F32":
                    raise UserError(f"{self.folder} holds {key!r} as {dtype}, not F32 or I8")
                self.shapes[key] = shape
        for name, keys in starts.items():
            height, widths = 0, set()
            for first, key in sorted(keys.items()):
                shape, scale = self._header(key).shape, key + _SCALE
                if len(shape) != 2 or scale not in self._files:
                    raise UserError(f"{self.folder} holds {key!r} without one scale for each row")
                if first != height or name in self.shapes:
                    raise UserError(f"{self.folder} does not hold all rows of {name!r} once")
                height += shape[0]
                widths.add(shape[1])
            if len(widths) > 1:
                raise UserError(f"{self.folder} holds rows of {name!r} of different widths")
            self.shapes[name] = [height, *widths]
            self._blocks[name] = [keys[first] for first in sorted(keys)]

    def _block(self, key: str) -> Int8Rows:
        """Rows in int8 with valid scales."""
        integers, scales = self._files[key][key], self._files[key + _SCALE][key + _SCALE]
        holds = f"{self.folder} holds {key!r}"
        if scales.shape != integers.shape[:1]:
            raise UserError(f"{holds} without one scale for each row")
        is_valid = scales.dtype == torch.float32 and bool((scales >= 0).all())
        if not is_valid or not scales.isfinite().all():
            raise UserError(f"{holds} with scales that are not finite numbers >= 0")
        # numpy's minimum of bytes is vectorised, torch's is not.
        if integers.numel() and int(integers.numpy().min()) < -LARGEST:
            raise UserError(f"{holds} with -128, which is not a weight")
        return Int8Rows(integers, scales)


def dequantised(parameter: Parameter) -> Tensor:
    """The parameter as a tensor in float32."""
    return parameter.dequantise() if isinstance(parameter, Int8Rows) else parameter


def _parts(name: str, tensor: Tensor) -> list[dict[str, Tensor]]:
    """Tensors that are stored for a parameter; large tables are stored in blocks of rows."""
    if tensor.dim() != 2:
        return [{name: tensor.detach().float().contiguous()}]
    rows = quantise(tensor)
    height = max(1, (SHARD_BYTES // 2) // max(1, tensor.shape[1]))
    if rows.integers.shape[0] <= height:
        return [{name: rows.integers, name + _SCALE: rows.scales}]
    return [
        {
            f"{name}[{first}]": rows.integers[first : first + height].contiguous(),
            f"{name}[{first}]{_SCALE}": rows.scales[first : first + height].contiguous(),
        }
        for first in range(0, len(rows.integers), height)
    ]


def _open_shards(folder: Path, names: Any) -> Iterator[TensorFile]:
    """Yield the files that `config.json` lists, after a check of their names."""
    if not isinstance(names, list) or not 0 < len(names) <= MAX_SHARDS:
        raise UserError(f"{folder} must list 1 to {MAX_SHARDS} files of weights")
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"{folder} lists {str(name)[:80]!r}, which is no file of int8 weights")
        yield TensorFile(folder / name)
