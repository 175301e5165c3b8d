"""Models on disk in int8: safetensors shards of rows with scales, beside `config.json`.

A table `NAME` [n, m] is stored as `NAME` in int8 and `NAME.scale` [n] in float32. All other
parameters are float32. A shard has less than 16 MB, so that a model can be kept in a repository.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reluformer.errors import UserError
from reluformer.model.int8 import LARGEST, Int8Rows, quantise
from reluformer.model.tensor_files import tensor_shapes, write_tensors

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


def read_shards(folder: Path, names: Any) -> dict[str, Parameter]:
    """Read the parameters of shards.

    Args:
        folder: Folder of the model.
        names: Names of the files, as in `config.json`.

    Raises:
        UserError: A file is missing or damaged, or has an impossible name.
    """
    if not isinstance(names, list) or not 0 < len(names) <= MAX_SHARDS:
        raise UserError(f"{folder} must list 1 to {MAX_SHARDS} files of weights")
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"{folder} lists {str(name)[:80]!r}, which is no file of int8 weights")
        for key, tensor in _read(folder / name).items():
            if key in tensors:
                raise UserError(f"{folder / name} holds {key!r}, which another file holds too")
            tensors[key] = tensor
    return _joined(folder, tensors)


def shape_of(parameter: Parameter) -> list[int]:
    """Shape of a parameter."""
    return [*(parameter.integers if isinstance(parameter, Int8Rows) else parameter).shape]


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


def _read(path: Path) -> dict[str, Tensor]:
    # Damaged headers are refused before the library reads them.
    tensor_shapes(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, LookupError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _joined(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Parameter]:
    """Parameters from stored tensors: rows with their scales, blocks of rows in order."""
    parameters: dict[str, Parameter] = {}
    blocks: dict[str, dict[int, Int8Rows]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            rows = _checked(folder, name, tensor, tensors.get(name + _SCALE))
            match = re.fullmatch(r"(.*)\[([0-9]{1,12})\]", name)
            if match is None:
                parameters[name] = rows
            else:
                blocks.setdefault(match[1], {})[int(match[2])] = rows
        elif not name.endswith(_SCALE):
            if tensor.dtype != torch.float32:
                raise UserError(f"{folder} holds {name!r} as {tensor.dtype}, not float32 or int8")
            parameters[name] = tensor
    for name, found in blocks.items():
        ordered = [found[first] for first in sorted(found)]
        starts = [0]
        for rows in ordered:
            starts.append(starts[-1] + len(rows.integers))
        widths = {rows.integers.shape[1] for rows in ordered}
        if starts[:-1] != sorted(found) or len(widths) > 1 or name in parameters:
            raise UserError(f"{folder} does not hold all rows of {name!r} once")
        parameters[name] = Int8Rows(*(torch.cat(part) for part in zip(*ordered, strict=True)))
    return parameters


def _checked(folder: Path, name: str, integers: Tensor, scales: Tensor | None) -> Int8Rows:
    """Rows in int8 with valid scales."""
    if integers.dim() != 2 or scales is None or scales.shape != integers.shape[:1]:
        raise UserError(f"{folder} holds {name!r} without one scale for each row")
    is_valid = scales.dtype == torch.float32 and bool((scales >= 0).all())
    if not is_valid or not scales.isfinite().all():
        raise UserError(f"{folder} holds {name!r} with scales that are not finite numbers >= 0")
    # numpy's minimum of bytes is vectorised, torch's is not.
    if integers.numel() and int(integers.numpy().min()) < -LARGEST:
        raise UserError(f"{folder} holds {name!r} with -128, which is not a weight")
    return Int8Rows(integers, scales)
