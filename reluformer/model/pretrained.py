"""Models on disk: `model.safetensors` beside `config.json`."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from reluformer.config.migration import migrate
from reluformer.config.schema import build, to_dict
from reluformer.errors import UserError
from reluformer.files import atomic_path, write_json
from reluformer.model.config import ModelConfig
from reluformer.reading import JSON_LIMIT, open_regular, parse_json, read_json_object

if TYPE_CHECKING:
    from reluformer.model.base import Model

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FORMAT = 1

M = TypeVar("M", bound="Model")


def save_pretrained(model: "Model", folder: Path) -> None:
    """Write the weights, then the configuration, without which the folder is not loadable."""
    write_tensors(folder / WEIGHTS, distinct_tensors(model))
    description = {
        "format": FORMAT,
        "model": type(model).__name__,
        "config": to_dict(model.config),
    }
    write_json(folder / CONFIG, description)


def load_pretrained(cls: type[M], folder: Path) -> M:
    """Load the model that `save_pretrained` wrote, in evaluation mode.

    Raises:
        UserError: Files are missing or damaged, or describe another model class.
    """
    path = folder / CONFIG
    if not path.is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} holds no saved model: it must have {CONFIG} and {WEIGHTS}")
    description = read_json_object(path)
    if description.get("format") != FORMAT:
        raise UserError(f"{path} is not of format {FORMAT}")
    if description.get("model") != cls.__name__:
        described = str(description.get("model"))[:80]
        raise UserError(f"{path} describes a {described}, not a {cls.__name__}")
    config = build(ModelConfig, migrate(description.get("config")), "config")
    return model_of(cls, config, folder / WEIGHTS).eval()


def model_of(cls: type[M], config: ModelConfig, weights: Path) -> M:
    """Build the model of `config` with the tensors of a safetensors file.

    The header of the file is compared with the configuration first. A file of a few bytes can
    therefore not request a model that fills the memory.

    Raises:
        UserError: The file is damaged, or its tensors are not those of the model.
    """
    shapes = tensor_shapes(weights)
    layers = config.encoder_layers + config.decoder_layers
    if layers > len(shapes):
        raise UserError(f"{weights} does not fit this model: it has fewer tensors than layers")
    try:
        # Tensors on the meta device have a shape and no memory.
        with torch.device("meta"):
            skeleton = cls(config)
    except (RuntimeError, OverflowError) as error:
        raise UserError(f"{weights} does not fit this model: {error}") from None
    _check_shapes(skeleton, shapes, weights)
    model = cls(config)
    load_tensors(model, read_tensors(weights), weights)
    return model


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


def distinct_tensors(model: "Model") -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a shared one appears once."""
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept[name] = tensor.detach().contiguous()
    return kept


def load_tensors(model: "Model", tensors: dict[str, Tensor], path: Path) -> None:
    """Load `tensors` into the model; names and shapes must match exactly.

    Args:
        model: The model.
        tensors: Tensors by name, as from `distinct_tensors`.
        path: Origin of the tensors, for error messages.
    """
    _check_shapes(model, {name: [*tensor.shape] for name, tensor in tensors.items()}, path)
    model.load_state_dict(tensors, strict=False)


def _check_shapes(model: "Model", shapes: Mapping[str, list[int]], path: Path) -> None:
    """Raise UserError unless `shapes`, by name, are exactly those of the model's tensors."""
    expected = {name: [*tensor.shape] for name, tensor in distinct_tensors(model).items()}
    unmatched = sorted(set(expected) ^ set(shapes))
    if unmatched:
        where = "missing from" if unmatched[0] in expected else "unknown in"
        raise UserError(f"{path} does not fit this model: {unmatched[0]!r} is {where} it")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise UserError(
                f"{path} does not fit this model: {name!r} has shape {shape}, "
                f"expected {expected[name]}"
            )
