"""Engines that translate token ids: a model in torch, or the native library."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch

from reluformer.checkpoint import StoredRun, load_run, read_run
from reluformer.config.recipe import Recipe
from reluformer.config.search import SearchConfig
from reluformer.data.tokenizer import Tokenizer
from reluformer.errors import UserError, quote
from reluformer.model import ModelConfig, ReLUFormer
from reluformer.translation.native.model import NativeModel
from reluformer.translation.native.search import search as native_search
from reluformer.translation.native.support import NOT_BUILT, load, why_not
from reluformer.translation.search import Hypothesis, search

log = logging.getLogger("reluformer")

Precision: TypeAlias = Literal["float32", "bfloat16", "int8"]
DecoderName: TypeAlias = Literal["auto", "native", "torch"]
PRECISIONS = ("float32", "bfloat16", "int8")
DECODERS = ("auto", "native", "torch")

Ids: TypeAlias = Sequence[Sequence[int]]


class Engine(Protocol):
    """Searches for translations of token ids."""

    config: ModelConfig
    device: str
    """`cpu` or `cuda`."""

    @property
    def model(self) -> ReLUFormer:
        """The model in torch."""

    def search(
        self, sources: Ids, config: SearchConfig, banned: tuple[int, ...], keys: Sequence[int]
    ) -> list[Hypothesis]:
        """Translate one batch; arguments as in `reluformer.translation.search.search`."""


class TorchEngine:
    """A model in torch."""

    def __init__(self, model: ReLUFormer) -> None:
        self.model, self.config = model.eval(), model.config
        self.device: str = model.target_embedding.weight.device.type

    def search(
        self, sources: Ids, config: SearchConfig, banned: tuple[int, ...], keys: Sequence[int]
    ) -> list[Hypothesis]:
        """Translate one batch."""
        return search(self.model, sources, config, banned=banned, keys=keys)


class NativeEngine:
    """A model in the native library. The model in torch is loaded when it is first needed."""

    device = "cpu"

    def __init__(self, native: NativeModel, load_model: Callable[[], ReLUFormer]) -> None:
        self.native, self.config = native, native.config
        self._load_model = load_model
        self._model: ReLUFormer | None = None

    @property
    def model(self) -> ReLUFormer:
        """The model in torch, for attention maps."""
        if self._model is None:
            self._model = self._load_model()
        return self._model

    def search(
        self, sources: Ids, config: SearchConfig, banned: tuple[int, ...], keys: Sequence[int]
    ) -> list[Hypothesis]:
        """Translate one batch."""
        return native_search(self.native, sources, config, banned=banned, keys=keys)


class LoadedEngine(NamedTuple):
    """An engine with the tokenizer and the recipe of its model."""

    engine: Engine
    tokenizer: Tokenizer
    recipe: Recipe


def load_engine(
    path: Path | str,
    device: str | None,
    precision: Precision | None,
    decoder: DecoderName,
) -> LoadedEngine:
    """Load a model for translation; arguments as in `Translator.load`."""
    for name, value, allowed in (
        ("precision", precision, (*PRECISIONS, None)),
        ("decoder", decoder, DECODERS),
    ):
        if value not in allowed:
            names = ", ".join(str(choice) for choice in allowed if choice is not None)
            raise UserError(f"{name} must be one of {names}, got {quote(value)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_required = decoder == "native" or precision == "int8"
    reason: str | None = f"it runs on the CPU, and device is {device!r}"
    if decoder == "torch":
        reason = "decoder is 'torch'"
    elif device == "cpu":
        reason = NOT_BUILT
        if load() is not None:
            stored = read_run(path)
            reason = why_not(stored.model.skeleton.config)
            if reason is None:
                return _native(path, stored, precision)
    if is_required:
        option = f"decoder is {decoder!r}" if decoder == "native" else "precision is 'int8'"
        raise UserError(f"{option}, but the native library cannot be used: {reason}")
    loaded = _torch(path, device, precision)
    if decoder == "auto" and device == "cpu":
        level = logging.WARNING if reason == NOT_BUILT else logging.INFO
        log.log(level, "torch decodes, because the native library cannot be used: %s", reason)
    return loaded


def _native(path: Path | str, stored: StoredRun, precision: Precision | None) -> LoadedEngine:
    precision = precision or ("int8" if stored.model.is_int8 else "float32")
    native = NativeModel.read(stored.model, precision)
    engine = NativeEngine(native, lambda: load_run(path).model)
    return LoadedEngine(engine, stored.tokenizer, stored.recipe)


def _torch(path: Path | str, device: str, precision: Precision | None) -> LoadedEngine:
    run = load_run(path)
    precision = precision or ("float32" if device == "cpu" else "bfloat16")
    try:
        model = run.model.to(device, getattr(torch, precision))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"device must be usable on this machine, got {device!r}: {reason}"
        ) from None
    return LoadedEngine(TorchEngine(model), run.tokenizer, run.recipe)
