"""Row sums and entropies of the kernels, in the public function and in the losses of models."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer.bench import gate
from reluformer.bench.cases import Case
from reluformer.bench.features import features
from reluformer.model import AttentionConfig, ReLUFormer
from reluformer.model.attention import MultiHeadAttention
from reluformer.model.losses import attention_losses
from reluformer.model.records import ForwardOptions
from reluformer.ops.backends.triton import op, tuning
from reluformer.ops.backends.triton.tuning import Tile
from reluformer.ops.stats import ENTROPY_BLOCK, SumsLevel, sampled_rows
from tests.model.factory import batch, small
from tests.ops.backends.triton.test_op import SMALL, on_cpu
from tests.ops.inputs import make
from tests.ops.rectified import run_kernel
from tests.ops.sums import check_sums

pytestmark = on_cpu


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    with tuning.override(dict(SMALL)):
        yield


@pytest.mark.parametrize(
    ("level", "rules"),
    [
        ("row_sum", {"causal": True, "window": 5}),
        ("entropy", {"causal": True, "key_lengths": torch.tensor([3, 33])}),
        ("entropy", {"key_lengths": torch.tensor([33, 0]), "power": 2}),
        ("entropy", {"mask": torch.arange(33) % 3 > 0}),
        ("entropy", {"causal": True, "key_lengths": torch.tensor([3, 33]), "row_normalise": 0.1}),
    ],
    ids=["window", "causal", "nothing to see", "mask", "normalised"],
)
def test_sums_of_a_call(level: SumsLevel, rules: dict[str, Any]) -> None:
    sizes = {"heads": 2, "kv_heads": 1, "rows": 19, "keys": 33, "width": 16, "value_width": 16}
    q, k, v = make(**sizes, dtype=torch.float32)
    check_sums("triton", level, q, k, v, rtol=1e-5, **rules)


@pytest.mark.parametrize(
    ("rows", "rules"),
    [
        (530, {"entropy_every": 3}),
        (300, {"entropy_every": 2, "causal": True, "power": 2}),
        (300, {"entropy_every": 2, "power": 4, "row_normalise": 0.1}),
        (19, {"entropy_every": 2, "key_lengths": torch.tensor([9, 4]), "power": 4}),
    ],
    ids=["three blocks", "two blocks", "power four", "one block"],
)
def test_sampled_entropies(rows: int, rules: dict[str, Any]) -> None:
    q, k, v = make(batch=2, heads=2, kv_heads=1, rows=rows, keys=9, width=16, value_width=16)
    wide = {"forward": Tile(256, 16, 4, 1), "dq": Tile(64, 16, 4, 1)}
    keys = Tile(128, 16, 4, 1, prescale=rows == 300)
    with tuning.override({**wide, "dkv": keys}, tma=True):
        check_sums("triton", "entropy", *(x.float() for x in (q, k, v)), rtol=1e-5, **rules)


def test_log_sums_that_are_not_sampled_are_constants() -> None:
    q, k, v = (x.float().requires_grad_() for x in make(heads=2, rows=19, width=16, value_width=16))
    gamma = torch.tensor([0.7, 1.2], requires_grad=True)
    settings = {
        "scale": 0.25, "gamma": gamma, "length_exponent": 0.5, "power": 1, "threshold": 0.0,
        "causal": False, "window": None, "key_lengths": None, "mask": None, "dropout_p": 0.0,
        "row_normalise": None,
    }  # fmt: skip
    every, some = (
        run_kernel(op.attend, q, k, v, {**settings, "statistics": 2, "entropy_every": every})[2]
        for every in (1, 2)
    )
    assert every is not None and some is not None
    wanted = every * sampled_rows(2, 2, 19, 2, q.device)
    torch.testing.assert_close(some, wanted)
    leaves = [q, k, gamma]
    grads = (torch.autograd.grad(each.sum(), leaves) for each in (some, wanted))
    torch.testing.assert_close(*grads)


def test_the_bench_checks_sampled_entropies() -> None:
    case = Case("features", "cpu", "float32", 2, 4, 4, 24, 24, 16)
    check = gate.check(case, features(case)["row sums, one entropy in 8"])
    assert check.passed and len(check.errors) == 6, check


def test_no_tile_has_more_rows_than_a_block() -> None:
    kernels: tuple[tuning.Kernel, ...] = ("forward", "dkv", "dq")
    found = [tuning.every(k, w, size) for k in kernels for w in (64, 128, 256) for size in (2, 4)]
    for tile in itertools.chain(*found):
        assert ENTROPY_BLOCK % tile.queries == 0


def _losses(impl: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Losses, logits and the gradients of all weights, of one model and batch."""
    torch.manual_seed(0)
    learned = {"attention_gamma": "head", "attention_threshold": "head"}
    sizes = {"width": 32, "heads": 2, "kv_heads": 1, "encoder_layers": 1, "decoder_layers": 1}
    model = ReLUFormer(small(attention_impl=impl, **learned, **sizes))
    output = model(**batch(), record="entropy")
    losses = attention_losses(output.records)
    total = losses.normalisation + losses.entropy + output.logits.square().mean()
    gradients = torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad])
    return torch.stack(losses).detach(), output.logits.detach(), list(gradients)


def test_losses_of_a_model() -> None:
    torch.testing.assert_close(_losses("triton"), _losses("reference"), rtol=1e-4, atol=1e-5)


def test_a_recording_layer_compiles_without_a_graph_break() -> None:
    """A compiler sees the operators, not the kernels."""
    config = small(width=32, heads=2, kv_heads=1)
    layer = MultiHeadAttention(config, AttentionConfig(impl="triton", gamma="head"), causal=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    x, lengths = torch.randn(2, 7, 32), torch.tensor([7, 4])
    found = []
    for run in (layer, compiled):
        made = run(x, None, ForwardOptions(lengths, "entropy"), key_lengths=lengths)
        sums = made.stats
        total = made.output.sum() + sums.row_sum.square().sum() + sums.entropy.sum()
        grads = torch.autograd.grad(total, [p for p in layer.parameters() if p.requires_grad])
        found.append((made.output, *sums, made.valid, *grads))
    torch.testing.assert_close(*found)
