"""Row sums and entropies out of the kernels, from the public function to the models' losses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer.model import AttentionConfig, ReLUFormer
from reluformer.model.attention import MultiHeadAttention
from reluformer.model.losses import attention_losses
from reluformer.ops.stats import SumsLevel
from reluformer.ops.triton import tiles
from tests.model.factory import batch, small
from tests.ops.inputs import make
from tests.ops.sums import check_sums
from tests.ops.triton.test_op import SMALL, on_cpu

pytestmark = on_cpu


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with tiles.override(dict(SMALL)):
        yield


@pytest.mark.parametrize(
    ("level", "rules"),
    [
        ("row_sum", {"causal": True, "window": 5}),
        ("entropy", {"causal": True, "key_lengths": torch.tensor([3, 33])}),
        ("entropy", {"key_lengths": torch.tensor([33, 0]), "power": 2}),
        ("entropy", {"mask": torch.arange(33) % 3 > 0}),
        ("entropy", {"causal": True, "key_lengths": torch.tensor([3, 33]), "normalise": 0.1}),
    ],
    ids=["window", "causal", "nothing to see", "mask", "normalised"],
)
def test_sums_of_a_call(level: SumsLevel, rules: dict[str, Any]) -> None:
    sizes = {"heads": 2, "kv_heads": 1, "rows": 19, "keys": 33, "width": 16, "value_width": 16}
    q, k, v = make(**sizes, dtype=torch.float32)
    check_sums("triton", level, q, k, v, rtol=1e-5, **rules)


def _losses(impl: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Losses, logits and the gradients of all weights, of one model and batch."""
    torch.manual_seed(0)
    learned = {"attention_gamma": "head", "attention_threshold": "head"}
    sizes = {"width": 32, "heads": 2, "kv_heads": 1, "encoder_layers": 1, "decoder_layers": 1}
    model = ReLUFormer(small(attention_impl=impl, **learned, **sizes))
    output = model(**batch(), record="entropy")
    losses = attention_losses(output.readings)
    total = losses.normalisation + losses.entropy + output.logits.square().mean()
    gradients = torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad])
    return torch.stack(losses).detach(), output.logits.detach(), list(gradients)


def test_losses_of_a_model() -> None:
    torch.testing.assert_close(_losses("triton"), _losses("reference"), rtol=1e-4, atol=1e-5)


def test_a_recording_layer_compiles_without_a_graph_break() -> None:
    """What compilers see are the operators, not what the kernels do."""
    config = small(width=32, heads=2, kv_heads=1)
    layer = MultiHeadAttention(config, AttentionConfig(impl="triton", gamma="head"), causal=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    x, lengths = torch.randn(2, 7, 32), torch.tensor([7, 4])
    found = []
    for run in (layer, compiled):
        made = run(x, query_lengths=lengths, key_lengths=lengths, record="entropy")
        sums = made.stats
        total = made.output.sum() + sums.row_sum.square().sum() + sums.entropy.sum()
        grads = torch.autograd.grad(total, [p for p in layer.parameters() if p.requires_grad])
        found.append((made.output, *sums, made.valid, *grads))
    torch.testing.assert_close(*found)
