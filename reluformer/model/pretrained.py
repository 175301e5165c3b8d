"""Models on disk: `model.safetensors`, or shards in int8, beside `config.json`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reluformer.config.migration import migrate
from reluformer.config.schema import build, to_dict
from reluformer.errors import UserError
from reluformer.files import write_json
from reluformer.model.config import ModelConfig
from reluformer.model.int8_files import Int8Shards, Parameter, dequantised, write_shards
from reluformer.model.tensor_files import TensorFile, read_tensors, tensor_shapes, write_tensors
from reluformer.reading import read_json_object

if TYPE_CHECKING:
    from reluformer.model.base import Model

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FORMAT = 1

M = TypeVar("M", bound="Model")


class _WithoutRandomNumbers(TorchFunctionMode):
    """Skips random initial values, for which the meta device would import torch's compiler."""

    skipped = (
        nn.init.normal_,
        nn.init.kaiming_uniform_,
        nn.init.uniform_,
        nn.init.xavier_uniform_,
        Tensor.normal_,
        Tensor.uniform_,
    )

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the tensor as it is in place of a random one."""
        kwargs = kwargs or {}
        if func in self.skipped:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


class StoredModel(NamedTuple, Generic[M]):
    """A model as it is on the disk: its structure and the values of its parameters."""

    skeleton: M
    """The model on the meta device, without memory."""
    parameters: Mapping[str, Parameter]
    """Values by name, each read when it is looked up; a shared parameter appears once."""
    is_int8: bool
    """Whether tables are stored in int8."""

    def lookup(self) -> Callable[[str], Parameter]:
        """Function from a name in the model, also a further name of a shared parameter, to a value.

        Each call reads the value from the disk.
        """
        tensors = self.skeleton.state_dict(keep_vars=True)
        stored = {id(tensors[name]): name for name in self.parameters}
        names = {name: stored[id(tensor)] for name, tensor in tensors.items()}
        return lambda name: self.parameters[names[name]]

    def build(self) -> M:
        """The model in float32, in evaluation mode."""
        tensors = {name: dequantised(value) for name, value in self.parameters.items()}
        self.skeleton.load_state_dict(tensors, strict=False, assign=True)
        return self.skeleton.eval()


def save_pretrained(model: "Model", folder: Path) -> None:
    """Write the weights, then the configuration, without which the folder is not loadable."""
    write_tensors(folder / WEIGHTS, distinct_tensors(model))
    write_json(folder / CONFIG, _description(model))


def save_int8(model: "Model", folder: Path) -> None:
    """Write a model with tables of weights in int8, see `reluformer.model.int8_files`."""
    files = write_shards(folder, distinct_tensors(model))
    write_json(folder / CONFIG, {**_description(model), "weights": "int8", "files": files})


def load_pretrained(cls: type[M], folder: Path) -> M:
    """Load the model that `save_pretrained` or `save_int8` wrote, in evaluation mode.

    Raises:
        UserError: Files are missing or damaged, or describe another model class.
    """
    description, config = _read_description(cls, folder)
    if "files" in description:
        return _read_int8(cls, config, folder, description["files"]).build()
    return model_of(cls, config, folder / WEIGHTS).eval()


def read_pretrained(cls: type[M], folder: Path) -> StoredModel[M]:
    """Read the parameters of a saved model; errors as in `load_pretrained`."""
    description, config = _read_description(cls, folder)
    if "files" in description:
        return _read_int8(cls, config, folder, description["files"])
    return read_model(cls, config, folder / WEIGHTS)


def read_model(cls: type[M], config: ModelConfig, weights: Path) -> StoredModel[M]:
    """Read the parameters of a model from a safetensors file; errors as in `model_of`."""
    parameters = TensorFile(weights)
    shapes = {name: header.shape for name, header in parameters.headers.items()}
    return StoredModel(_skeleton(cls, config, shapes, weights), parameters, is_int8=False)


def model_of(cls: type[M], config: ModelConfig, weights: Path) -> M:
    """Build the model of `config` with the tensors of a safetensors file.

    The header of the file is compared with the configuration first. A file of a few bytes can
    therefore not request a model that fills the memory.

    Raises:
        UserError: The file is damaged, or its tensors are not those of the model.
    """
    _skeleton(cls, config, tensor_shapes(weights), weights)
    model = cls(config)
    load_tensors(model, read_tensors(weights), weights)
    return model


def _description(model: "Model") -> dict[str, Any]:
    return {"format": FORMAT, "model": type(model).__name__, "config": to_dict(model.config)}


def _read_description(cls: type[M], folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """Fields of `config.json`, and the configuration of the model."""
    path = folder / CONFIG
    description = read_json_object(path) if path.is_file() else {}
    if "files" not in description and not (path.is_file() and (folder / WEIGHTS).is_file()):
        raise UserError(f"{folder} holds no saved model: it must have {CONFIG} and {WEIGHTS}")
    if description.get("format") != FORMAT:
        raise UserError(f"{path} is not of format {FORMAT}")
    if description.get("model") != cls.__name__:
        described = str(description.get("model"))[:80]
        raise UserError(f"{path} describes a {described}, not a {cls.__name__}")
    return description, build(ModelConfig, migrate(description.get("config")), "config")


def _read_int8(cls: type[M], config: ModelConfig, folder: Path, files: Any) -> StoredModel[M]:
    parameters = Int8Shards(folder, files)
    skeleton = _skeleton(cls, config, parameters.shapes, folder)
    return StoredModel(skeleton, parameters, is_int8=True)


def _skeleton(
    cls: type[M], config: ModelConfig, shapes: Mapping[str, list[int]], origin: Path
) -> M:
    """The model on the meta device, after a check that `shapes` are those of its tensors."""
    layers = config.encoder_layers + config.decoder_layers
    if layers > len(shapes):
        raise UserError(f"{origin} does not fit this model: it has fewer tensors than layers")
    try:
        # Tensors on the meta device have a shape and no memory.
        with torch.device("meta"), _WithoutRandomNumbers():
            skeleton = cls(config)
    except (RuntimeError, OverflowError) as error:
        raise UserError(f"{origin} does not fit this model: {error}") from None
    _check_shapes(skeleton, shapes, origin)
    return skeleton


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
