"""Models on disk: `model.safetensors` beside `config.json`."""

import errno
import json
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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
    """Write the weights, then the configuration that makes the folder loadable."""
    write_tensors(folder / WEIGHTS, distinct_tensors(model))
    description = {
        "format": FORMAT,
        "model": type(model).__name__,
        "config": to_dict(model.config),
    }
    write_json(folder / CONFIG, description)


def load_pretrained(cls: type[M], folder: Path) -> M:
    """The model that `save_pretrained` wrote, in evaluation mode."""
    path = folder / CONFIG
    if not path.is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} holds no saved model: {CONFIG} and {WEIGHTS} are needed")
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
    """Write tensors by name, atomically, for those who may read what this process creates."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with atomic_path(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        try:
            save_file(tensors, partial)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(path)) from None
        # safetensors writes a file of its own, for its owner alone.
        partial.chmod(mode)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise UserError(f"{path} is missing")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def distinct_tensors(model: "Model") -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; one that is shared appears once."""
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept[name] = tensor.detach().contiguous()
    return kept


def load_tensors(model: "Model", tensors: dict[str, Tensor], path: Path) -> None:
    """Put `tensors` into the model; names and shapes must match exactly."""
    wanted = distinct_tensors(model)
    odd = sorted(set(wanted) ^ set(tensors))
    if odd:
        where = "missing from" if odd[0] in wanted else "unknown in"
        raise UserError(f"{path} does not fit this model: {odd[0]!r} is {where} it")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(
                f"{path} does not fit this model: {name!r} has shape {list(tensor.shape)}, "
                f"expected {list(wanted[name].shape)}"
            )
    model.load_state_dict(tensors, strict=False)
