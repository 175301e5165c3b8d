"""Rows of the rectified rule divided by their sums: the definition, and the fused paths."""

from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer import ModelConfig, ReLUFormer, relu_attention
from reluformer.errors import UserError
from reluformer.model.config import AttentionConfig
from reluformer.ops.rule import LEAST_EPSILON

EPSILON = 0.01
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "lengths": {"key_lengths": torch.tensor([11, 4])},
    "nothing visible": {"key_lengths": torch.tensor([0, 11])},
}


def leaves(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, 9, 8), "k": (2, 2, 11, 8), "v": (2, 2, 11, 6)}
    made = {n: torch.randn(s, generator=generator, dtype=dtype) for n, s in shapes.items()}
    made |= {"gamma": torch.rand(4, generator=generator, dtype=dtype) + 0.5}
    # Some rows of the last head have no weight at all.
    made |= {"threshold": torch.tensor([-1.0, -0.5, 0.0, 1.2], dtype=dtype)}
    return {name: each.requires_grad_() for name, each in made.items()}


def attend(given: dict[str, Tensor], impl: str, **options: Any) -> Any:
    q, k, v = (given[name] for name in "qkv")
    learned = {"gamma": given["gamma"], "threshold": given["threshold"]}
    return relu_attention(
        q, k, v, **learned, length_exponent=1.0, row_normalise=EPSILON, impl=impl, **options
    )


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("power", [1, 2])
def test_rows_are_divided_by_their_sums(mask: dict[str, Any], power: int) -> None:
    given = leaves()
    extras = {"return_weights": True, "return_sums": "entropy", "return_stats": True}
    found = attend(given, "reference", power=power, **extras, **mask)
    plain = relu_attention(
        *(given[name] for name in "qkv"), gamma=given["gamma"], threshold=given["threshold"],
        length_exponent=1.0, power=power, impl="reference", **extras, **mask,
    )  # fmt: skip
    sums = plain.weights.sum(-1, keepdim=True)
    torch.testing.assert_close(found.weights, plain.weights / (sums + EPSILON))
    torch.testing.assert_close(found.output, plain.output / (sums + EPSILON))
    assert bool((sums == 0).any()) and bool(found.output.isfinite().all())
    # Sums are those before the division, the rest is what was read.
    torch.testing.assert_close(found.sums, plain.sums)
    torch.testing.assert_close(found.stats.row_sum, plain.stats.row_sum)
    torch.testing.assert_close(found.stats.max, found.weights.amax(-1))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("power", [1, 2])
def test_the_fused_path_agrees(mask: dict[str, Any], power: int) -> None:
    results = []
    for impl in ("reference", "cpu"):
        given = leaves()
        found = attend(given, impl, power=power, return_sums="entropy", **mask)
        outputs = [found.output, found.sums.row_sum, found.sums.entropy]
        torch.manual_seed(1)
        ahead = [torch.randn_like(each) for each in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, list(given.values()), ahead)])
        plain = attend(given, impl, power=power, **mask)
        torch.testing.assert_close(plain, found.output)
    for wanted, actual in zip(*results, strict=True):
        assert bool(actual.isfinite().all())
        torch.testing.assert_close(actual, wanted)


def test_gradients_are_those_of_the_definition() -> None:
    given = leaves()
    assert torch.autograd.gradcheck(
        lambda *each: attend(dict(zip(given, each, strict=True)), "reference", causal=True),
        tuple(given.values()),
    )


@pytest.mark.parametrize("impl", ["reference", "cpu", "triton"])
def test_rows_without_weight_with_the_smallest_number(impl: str) -> None:
    if impl == "triton":
        pytest.importorskip("triton")
    q, k, v = (torch.randn(1, 2, 20, 16).requires_grad_() for _ in "qkv")
    out = relu_attention(q, k, v, threshold=1e3, row_normalise=LEAST_EPSILON, impl=impl)
    assert not any(each.any() for each in (out, *torch.autograd.grad(out.sum(), [q, k, v])))


def test_what_makes_no_sense_is_refused() -> None:
    given = leaves()
    for small in (0, 1e-31, -1.0):
        with pytest.raises(UserError, match="row_normalise must be a finite number of at least 1e"):
            relu_attention(given["q"], given["k"], given["v"], row_normalise=small)
    with pytest.raises(UserError, match="row_normalise needs negative_slope to be 0"):
        relu_attention(given["q"], given["k"], given["v"], row_normalise=0.1, negative_slope=0.2)


def model(**options: float) -> ReLUFormer:
    torch.manual_seed(0)
    attention = AttentionConfig(
        length_exponent=1.0, row_sum_init=1.0, threshold="head", threshold_init=-1.0,
        options=options,
    )  # fmt: skip
    return ReLUFormer(ModelConfig(20, 16, 2, slots=16, attention=attention)).eval()


@torch.no_grad()
def test_a_model_is_calibrated_before_its_rows_are_divided_and_decodes_as_it_reads() -> None:
    divided, plain = model(row_normalise=EPSILON), model()
    tokens = torch.randint(3, 20, (4, 9))
    for each in (divided, plain):
        each.calibrate([{"source": tokens, "target": tokens}])
    first, same = (each.encoder[0].self_attention.attention.gamma() for each in (divided, plain))
    assert first == same != 1.0
    state = divided.start(divided.encode(tokens))
    steps = [divided.decode(tokens[:, at : at + 1], state) for at in range(9)]
    full = divided(tokens, tokens).logits
    torch.testing.assert_close(torch.cat(steps, dim=1), full, rtol=1e-4, atol=1e-4)
