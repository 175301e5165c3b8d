"""Models as programs of `torch.export` and as ONNX files, for any batch size and any lengths.

The exported program is the forward pass in plain operations, the definition of the attention:
`impl="reference"`. Search and tokenisation are not part of it.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from reluformer.errors import UserError
from reluformer.files import atomic_path
from reluformer.model import ReLUFormer, ReLUFormerLM

OUTPUT_NAME = "logits"


class _TranslationLogits(nn.Module):
    """The logits of an encoder-decoder, without records."""

    INPUTS = ("source", "target", "source_lengths")

    def __init__(self, model: ReLUFormer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, target: Tensor, source_lengths: Tensor) -> Tensor:
        logits: Tensor = self.model(source, target, source_lengths).logits
        return logits


class _LanguageLogits(nn.Module):
    """The logits of a language model, without records."""

    INPUTS = ("tokens", "lengths")

    def __init__(self, model: ReLUFormerLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, lengths).logits
        return logits


def export_program(model: ReLUFormer | ReLUFormerLM) -> ExportedProgram:
    """Export the forward pass of a model in eval mode.

    Args:
        model: A `ReLUFormer` or `ReLUFormerLM`; it is not changed.

    Returns:
        A program from int64 tensors to logits [B, T, vocabulary]. Its inputs are source [B, S],
        target [B, T] and source_lengths [B], or tokens [B, T] and lengths [B] of a language model.

    Raises:
        UserError: If the model is of another class, or names a backend that cannot be exported.
    """
    return _export(_logits(model))


def export_onnx(model: ReLUFormer | ReLUFormerLM, path: str | Path) -> None:
    """Write the forward pass of a model in eval mode to an ONNX file.

    Args:
        model: As in `export_program`.
        path: File to write; inputs are named as in `export_program`, the output is `logits`.

    Raises:
        UserError: As in `export_program`, or if onnxscript is not installed.
    """
    wrapper = _logits(model)
    try:
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise UserError(
            f"ONNX files need pip install 'reluformer[export]' ({missing.name} is missing)"
        ) from None
    program = torch.onnx.export(
        _export(wrapper),
        dynamo=True,
        input_names=wrapper.INPUTS,
        output_names=[OUTPUT_NAME],
        verbose=False,
    )
    assert program is not None
    with atomic_path(Path(path)) as partial:
        program.save(partial, external_data=False)


def _logits(model: nn.Module) -> _TranslationLogits | _LanguageLogits:
    if isinstance(model, ReLUFormer):
        return _TranslationLogits(model)
    if isinstance(model, ReLUFormerLM):
        return _LanguageLogits(model)
    raise UserError(f"model must be a ReLUFormer or a ReLUFormerLM, got {type(model).__name__}")


def _export(wrapper: _TranslationLogits | _LanguageLogits) -> ExportedProgram:
    model = wrapper.model
    device = model.target_embedding.weight.device
    # All sizes differ: equal ones would be exported as one and the same dynamic size.
    sizes = range(5, 5 + len(wrapper.INPUTS) - 1)
    tokens = [torch.ones(2, size, dtype=torch.int64, device=device) for size in sizes]
    lengths = torch.tensor([sizes[0], 3], device=device)
    ids = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    shapes = [*[ids] * len(tokens), {0: Dim.DYNAMIC}]
    was_training = model.training
    try:
        with torch.no_grad():
            return torch.export.export(
                wrapper.eval(),
                (*tokens, lengths),
                dynamic_shapes=dict(zip(wrapper.INPUTS, shapes, strict=True)),
            )
    finally:
        model.train(was_training)
