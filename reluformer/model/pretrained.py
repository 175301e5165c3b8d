"""Models on disk: `model.safetensors` beside `config.json`."""

import errno
import json
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from reluformer.config.migration import migrate
from reluformer.config.schema import build, to_dict
from reluformer.errors import UserError
from reluformer.files import atomic_path, write_json
from reluformer.model.config import ModelConfig

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
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise UserError(f"{path} is not of format {FORMAT}")
    if description.get("model") != cls.__name__:
        raise UserError(f"{path} describes a {description.get('model')}, not a {cls.__name__}")
    model = cls(build(ModelConfig, migrate(description.get("config")), "config"))
    load_tensors(model, read_tensors(folder / WEIGHTS), folder / WEIGHTS)
    return model.eval()


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
    if not path.is_file():
        raise UserError(f"{path} is missing")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


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
    expected = distinct_tensors(model)
    unmatched = sorted(set(expected) ^ set(tensors))
    if unmatched:
        where = "missing from" if unmatched[0] in expected else "unknown in"
        raise UserError(f"{path} does not fit this model: {unmatched[0]!r} is {where} it")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{path} does not fit this model: {name!r} has shape {list(tensor.shape)}, "
                f"expected {list(expected[name].shape)}"
            )
    model.load_state_dict(tensors, strict=False)
