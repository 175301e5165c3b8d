"""Exported programs and ONNX files give the model's numbers at every batch size and length."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import reluformer.nn
from reluformer import (
    ATTENTIONS,
    AttentionConfig,
    ModelConfig,
    ReLUFormer,
    ReLUFormerLM,
    attention,
)
from reluformer.errors import UserError
from reluformer.export import export_onnx, export_program

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SMALL: dict[str, Any] = {
    "vocabulary": 50, "width": 16, "heads": 2, "slots": 24,
    "encoder_layers": 1, "decoder_layers": 1,
}  # fmt: skip
SIZES = [(2, 5, 6), (3, 12, 9), (1, 1, 1), (4, 1, 30)]
D = Dim.DYNAMIC


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(1, 50, (batch, length))


def lengths(batch: int, length: int) -> Tensor:
    return torch.randint(1, length + 1, (batch,))


def translation_inputs(batch: int, source: int, target: int) -> dict[str, Tensor]:
    return {
        "source": ids(batch, source),
        "target": ids(batch, target),
        "source_lengths": lengths(batch, source),
    }


def run_onnx(file: Path, inputs: dict[str, Tensor]) -> Tensor:
    """The first output of an ONNX file."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    return torch.from_numpy(session.run(None, arrays)[0])


def check_onnx(
    module: nn.Module, shapes: dict[str, Any], batches: list[dict[str, Tensor]], file: Path
) -> None:
    """Export a module with the first batch as example, and compare it on all of them."""
    pytest.importorskip("onnxscript")
    module.eval()
    program = torch.onnx.export(
        module, kwargs=batches[0], dynamo=True, dynamic_shapes=shapes, verbose=False,
        input_names=list(batches[0]),
    )  # fmt: skip
    assert program is not None
    program.save(file)
    for batch in batches:
        with torch.no_grad():
            wanted = module(**batch)
        torch.testing.assert_close(run_onnx(file, batch), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_translation_model_as_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model = ReLUFormer(ModelConfig(**SMALL)).train()
    export_onnx(model, tmp_path / "model.onnx")
    assert model.training and [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    model.eval()
    for size in SIZES:
        inputs = translation_inputs(*size)
        with torch.no_grad():
            wanted = model(**inputs).logits
        found = run_onnx(tmp_path / "model.onnx", inputs)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.release
def test_a_language_model_as_program() -> None:
    model = ReLUFormerLM(ModelConfig(**SMALL)).eval()
    program = export_program(model).module()
    for batch, length, _ in SIZES:
        inputs = ids(batch, length), lengths(batch, length)
        torch.testing.assert_close(program(*inputs), model(*inputs).logits)


@pytest.mark.release
def test_a_language_model_as_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model = ReLUFormerLM(ModelConfig(**SMALL)).eval()
    export_onnx(model, tmp_path / "model.onnx")
    for batch, length, _ in SIZES:
        inputs = {"tokens": ids(batch, length), "lengths": lengths(batch, length)}
        with torch.no_grad():
            wanted = model(**inputs).logits
        found = run_onnx(tmp_path / "model.onnx", inputs)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Llama(nn.Module):
    """Logits of a Llama model of transformers; 0 at padding, whose rows are not defined."""

    def __init__(self) -> None:
        super().__init__()
        from tests.hf.families import build

        self.model = build("llama", "normalised_relu")

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        logits: Tensor = output.logits
        return logits * attention_mask[..., None]


@pytest.mark.release
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_of_transformers_as_onnx(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def batch(count: int, length: int, left: bool) -> dict[str, Tensor]:
        mask = torch.arange(length) < lengths(count, length)[:, None]
        mask = mask.flip(1) if left else mask
        return {"input_ids": ids(count, length).clamp_max(39), "attention_mask": mask.long()}

    shapes = {"input_ids": {0: D, 1: D}, "attention_mask": {0: D, 1: D}}
    batches = [batch(2, 5, False), batch(3, 12, True), batch(4, 2, False)]
    check_onnx(Llama(), shapes, batches, tmp_path / "llama.onnx")


class Attention(nn.Module):
    """A call of the public function."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor) -> Tensor:
        result: Tensor = attention(self.kind, q, k, v, causal=True, key_lengths=key_lengths)
        return result


FURTHER = ("normalised_relu", "softmax", "silu", "sigmoid", "top_k", "stick_breaking")


@pytest.mark.parametrize(
    "kind", ["relu", *(pytest.param(kind, marks=pytest.mark.release) for kind in FURTHER)]
)
def test_a_call_as_onnx(kind: str, tmp_path: Path) -> None:
    def batch(count: int, keys: int, rows: int) -> dict[str, Tensor]:
        q, k, v = (torch.randn(count, 2, length, 8) for length in (rows, keys, keys))
        return {"q": q, "k": k, "v": v, "key_lengths": lengths(count, keys)}

    shapes = {"q": {0: D, 2: D}, "k": {0: D, 2: D}, "v": {0: D, 2: D}, "key_lengths": {0: D}}
    check_onnx(Attention(kind), shapes, [batch(*size) for size in SIZES], tmp_path / "call.onnx")


class Plain(nn.Module):
    """A call of the public function without key lengths."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.options = kind, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = attention(self.kind, q, k, v, **self.options)
        return result


def check_program(module: nn.Module, example: tuple[int, int], is_strict: bool) -> None:
    """Export with lengths in named ranges, and compare at shorter and longer ones."""

    def batch(keys: int, rows: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(2, 2, length, 8) for length in (rows, keys, keys))

    keys, rows = Dim("keys", min=1, max=64), Dim("rows", min=1, max=64)
    shapes = ({2: rows}, {2: keys}, {2: keys})
    program = torch.export.export(
        module, batch(*example), dynamic_shapes=shapes, strict=is_strict
    ).module()
    for size in ((1, 1), (2, 1), (3, 4), (8, 8), (9, 2), (64, 5)):
        inputs = batch(*size)
        torch.testing.assert_close(program(*inputs), module(*inputs))


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("example", [(3, 4), (12, 9)], ids=str)
@pytest.mark.parametrize("is_strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("kind", ["top_k", "stick_breaking", "softmax"])
def test_programs_have_no_limit_of_lengths(
    kind: str, is_strict: bool, example: tuple[int, int], options: dict[str, Any]
) -> None:
    check_program(Plain(kind, options), example, is_strict)


@pytest.mark.release
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_every_attention_as_program(kind: str) -> None:
    check_program(Plain(kind, {"causal": True}), (12, 9), is_strict=False)


class Encoder(nn.Module):
    """A drop-in layer with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = reluformer.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        result: Tensor = self.layer(x, src_key_padding_mask=padding)
        return result


class Decoder(nn.Module):
    """A drop-in layer with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = reluformer.nn.TransformerDecoderLayer(16, 2, 24, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        result: Tensor = self.layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
        return result


@pytest.mark.slow
def test_a_drop_in_encoder_layer_as_onnx(tmp_path: Path) -> None:
    def batch(count: int, length: int) -> dict[str, Tensor]:
        padding = torch.arange(length) >= lengths(count, length)[:, None]
        return {"x": torch.randn(count, length, 16), "padding": padding}

    shapes = {"x": {0: D, 1: D}, "padding": {0: D, 1: D}}
    batches = [batch(2, 5), batch(3, 12), batch(4, 2)]
    check_onnx(Encoder(), shapes, batches, tmp_path / "layer.onnx")


@pytest.mark.slow
def test_a_drop_in_decoder_layer_as_onnx(tmp_path: Path) -> None:
    def batch(count: int, length: int, memory: int) -> dict[str, Tensor]:
        return {"x": torch.randn(count, length, 16), "memory": torch.randn(count, memory, 16)}

    shapes = {"x": {0: D, 1: D}, "memory": {0: D, 1: D}}
    batches = [batch(2, 5, 6), batch(3, 12, 9), batch(4, 2, 30)]
    check_onnx(Decoder(), shapes, batches, tmp_path / "layer.onnx")


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got Linear$"):
        export_program(nn.Linear(2, 2))  # type: ignore[arg-type]
    model = ReLUFormer(ModelConfig(**SMALL, attention=AttentionConfig(impl="cpu")))
    with pytest.raises(UserError, match="impl='cpu' cannot run"):
        export_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
