"""Row sums and entropies without a map: every implementation against the reference's statistics."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from reluformer import RowSums, attention
from reluformer.errors import UserError
from reluformer.ops.backends.cpu import plan, tiles
from reluformer.ops.backends.registry import BACKENDS, Kernel
from reluformer.ops.call import Call, KernelResult
from reluformer.ops.rule import Rectified
from reluformer.ops.stats import SumsLevel, sampled_rows
from tests.ops.inputs import assert_same, every_attention, gradients, make, tensor_options
from tests.ops.sums import check_sums


@every_attention
@pytest.mark.parametrize("level", ["row_sum", "entropy"])
def test_sums_are_those_of_the_statistics(name: str, level: SumsLevel) -> None:
    q, k, v = make(rows=4, requires_grad=True)
    mask = torch.rand(2, 4, 4, 5) > 0.3
    mask[1, 2, 3] = False
    call = partial(attention, name, q, k, v, mask=mask, impl="reference")
    options = tensor_options(name, q, v)
    found = call(return_sums=level, **options)
    wanted = call(return_stats=True, **options)
    assert_same(found.output, wanted.output)
    assert isinstance(found.sums, RowSums) and found.stats is None and found.weights is None
    assert (found.sums.entropy is None) is (level == "row_sum")
    for field, tensor in found.sums._asdict().items():
        if tensor is not None:
            expected = getattr(wanted.stats, field)
            # The sums take the entropy from the weights before row normalisation.
            rounds = name == "normalised_relu" and field == "entropy"
            close = partial(assert_close, rtol=1e-9, atol=1e-12) if rounds else assert_same
            close(tensor, expected)
            assert tensor.requires_grad is (field != "visible")
            if tensor.requires_grad:
                close(gradients(tensor, [q, k]), gradients(expected, [q, k]))


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 700), st.integers(1, 9))
def test_sampled_rows_are_the_definition(batch: int, heads: int, rows: int, every: int) -> None:
    found = sampled_rows(batch, heads, rows, every, torch.device("cpu"))
    assert found.shape == (batch, heads, rows)
    # Every row of a block alike, so a few of each block tell.
    for b, h in itertools.product(range(batch), range(heads)):
        for row in (*range(0, rows, 256), *range(255, rows, 256), *range(97, rows, 256)):
            assert bool(found[b, h, row]) is ((row // 256 + h + b) % every == 0)
    if rows:
        assert found[0, 0, 0]


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_entropies_of_sampled_rows_are_those_of_all(impl: str) -> None:
    q, k, v = make(rows=300, requires_grad=True)
    call = partial(attention, "relu", q, k, v, causal=True, impl=impl, return_sums="entropy")
    every, some = call().sums, call(entropy_every=3).sums
    assert every.sampled is None
    assert some.sampled.any(dim=(0, 1)).all() and not some.sampled.all()
    assert_same(some.row_sum, every.row_sum)
    assert_same(some.entropy, every.entropy * some.sampled)
    assert every.entropy[~some.sampled].any()
    grad = torch.autograd.grad(some.entropy.sum(), q)[0]
    assert not grad[~some.sampled].any() and grad[some.sampled].any()
    assert call(entropy_every=3, return_sums="row_sum").sums.sampled is None


@pytest.mark.parametrize("every", [0, 2.0, True, None])
def test_an_impossible_sample_is_refused(every: Any) -> None:
    with pytest.raises(UserError, match=r"entropy_every must be a whole number of at least 1, got"):
        attention("relu", *make(), return_sums="entropy", entropy_every=every)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "ROWS", dict.fromkeys(tiles.ROWS, 4))
    monkeypatch.setattr(tiles, "SCORES", dict.fromkeys(tiles.SCORES, 4 * 3))
    monkeypatch.setattr(plan, "MANY_ROWS", 0)
    monkeypatch.setattr(plan, "SHORT", 0)


# One setting serves all examples.
@given(
    rows=st.integers(1, 7),
    keys=st.integers(1, 7),
    groups=st.sampled_from([1, 2]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 4),
    lengths=st.none() | st.tuples(st.integers(0, 7), st.integers(0, 7)),
    power=st.sampled_from([1, 2, 4, 8]),
    level=st.sampled_from(["row_sum", "entropy"]),
)
def _check_cpu(
    rows: int,
    keys: int,
    groups: int,
    causal: bool,
    window: int | None,
    lengths: tuple[int, int] | None,
    power: int,
    level: SumsLevel,
) -> None:
    q, k, v = make(rows=rows, keys=keys, kv_heads=4 // groups)
    rules = {"causal": causal, "window": window, "power": power, "length_exponent": 0.8}
    if lengths is not None:
        rules["key_lengths"] = torch.tensor(lengths).clamp(max=keys)
    check_sums("cpu", level, q, k, v, rtol=1e-9, **rules)


def test_the_cpu_path_makes_the_same(small_tiles: None) -> None:
    _check_cpu()


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_sums_are_those_before_dropout(impl: str) -> None:
    q, k, v = make(rows=5)
    plain, noisy = (
        attention("relu", q, k, v, impl=impl, dropout_p=p, return_sums="entropy")
        for p in (0.0, 0.5)
    )
    assert_same(tuple(noisy.sums), tuple(plain.sums))
    assert not torch.equal(noisy.output, plain.output)


@pytest.mark.parametrize("level", ["row_sum", "entropy"])
def test_dead_and_blind_rows_have_no_sums_and_no_gradient(level: SumsLevel) -> None:
    """All scores of the first element are negative, the second has no keys to see."""
    for impl in ("reference", "cpu"):
        q = torch.ones(2, 1, 3, 2, requires_grad=True)
        k, v = -torch.ones(2, 1, 4, 2), torch.ones(2, 1, 4, 2)
        lengths = torch.tensor([4, 0])
        sums = attention("relu", q, k, v, key_lengths=lengths, impl=impl, return_sums=level).sums
        made = [sums.row_sum] if sums.entropy is None else [sums.row_sum, sums.entropy]
        assert all(not each.any() for each in made)
        assert sums.visible[0].eq(4).all() and not sums.visible[1].any()
        (grad,) = torch.autograd.grad(sum(each.sum() for each in made), q)
        assert not grad.any()


def test_auto_takes_a_fused_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums alone keep a call on it; statistics and maps do not."""
    ran: list[str] = []

    cpu = BACKENDS["cpu"]
    assert isinstance(cpu, Kernel)

    def attend(call: Call, rule: Rectified) -> KernelResult:
        ran.append("fused")
        return cpu.attend(call, rule)

    monkeypatch.setitem(BACKENDS, "cpu", replace(cpu, attend=attend))
    q, k, v = make()
    for level in ("row_sum", "entropy"):
        assert attention("relu", q, k, v, return_sums=level).sums is not None
    assert ran == ["fused", "fused"]
    for extra in ({"return_stats": True}, {"return_weights": True}):
        attention("relu", q, k, v, return_sums="entropy", **extra)
    attention("leaky_relu", q, k, v, return_sums="entropy")
    assert ran == ["fused", "fused"]


@pytest.mark.parametrize(
    ("name", "impl", "arguments", "reason"),
    [
        ("softmax", "sdpa", {}, "neither weights nor statistics"),
        ("softmax", "cpu", {}, "rectified rules only"),
        ("leaky_relu", "cpu", {}, "no negative slope"),
        ("relu", "cpu", {"return_stats": True}, "nor statistics beyond `return_sums`"),
        ("relu", "triton", {"return_weights": True}, "nor statistics beyond `return_sums`"),
    ],
)
def test_a_named_implementation_makes_them_or_refuses(
    name: str, impl: str, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=rf"impl='{impl}' cannot run this {name} .*{reason}"):
        attention(name, *make(), impl=impl, return_sums="row_sum", **arguments)


@pytest.mark.parametrize("level", [True, "max", ("row_sum",)])
def test_an_unknown_level_is_refused(level: Any) -> None:
    allowed = r"\(None, 'row_sum', 'entropy'\)"
    with pytest.raises(UserError, match=rf"return_sums must be one of {allowed}, got "):
        attention("relu", *make(), return_sums=level)


def test_a_norm_behind_the_weights_leaves_the_sums_alone() -> None:
    q, k, v = make()
    gain: Tensor = tensor_options("rela", q, v)["gain"]
    found = [
        attention("rela", q, k, v, gain=gain, impl=impl, return_sums="entropy")
        for impl in ("cpu", "reference")
    ]
    for field in ("output", "sums"):
        torch.testing.assert_close(*(getattr(each, field) for each in found))
