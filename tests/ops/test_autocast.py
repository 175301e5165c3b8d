"""Autocast casts q, k and v as it does for torch's own attention."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reluformer import PagedCache, attention, decode_attention, relu_attention
from reluformer.errors import UserError
from reluformer.ops.varlen import relu_attention_varlen
from tests.ops.inputs import assert_same, every_attention, make

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
FLOAT32, FLOAT64 = torch.float32, torch.float64
# Dtypes of q, k and v that rotary embeddings return under autocast, and other combinations.
MIXTURES = [
    (FLOAT32, FLOAT32, BFLOAT16),
    (FLOAT32, FLOAT32, FLOAT32),
    (BFLOAT16, BFLOAT16, BFLOAT16),
    (FLOAT16, FLOAT32, BFLOAT16),
    (FLOAT64, FLOAT64, FLOAT64),
]
REFUSED = [(FLOAT64, FLOAT64, FLOAT32), (FLOAT32, FLOAT64, FLOAT64)]


def mixed(dtypes: tuple[torch.dtype, ...], requires_grad: bool = False) -> list[Tensor]:
    """q, k and v with as many heads each, in the given dtypes."""
    tensors = make(dtype=FLOAT32, kv_heads=4)
    pairs = zip(tensors, dtypes, strict=True)
    return [tensor.to(dtype).requires_grad_(requires_grad) for tensor, dtype in pairs]


def cast(tensors: list[Tensor], dtype: torch.dtype = BFLOAT16) -> list[Tensor]:
    """The tensors in the dtype of autocast, float64 as it is."""
    return [t.detach() if t.dtype == FLOAT64 else t.detach().to(dtype) for t in tensors]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
def test_the_rule_is_that_of_torch(dtypes: tuple[torch.dtype, ...], dtype: torch.dtype) -> None:
    q, k, v = mixed(dtypes)
    with torch.autocast("cpu", dtype):
        expected = scaled_dot_product_attention(q, k, v)
        ours = attention("softmax", q, k, v, impl="sdpa")
        other = relu_attention(q, k, v)
    assert_same(ours, expected)
    assert other.dtype is expected.dtype
    assert_same(other, relu_attention(*cast([q, k, v], dtype)))


@every_attention
def test_every_attention_takes_rotated_queries_and_keys(name: str) -> None:
    q, k, v = mixed(MIXTURES[0])
    with torch.autocast("cpu", BFLOAT16):
        output = attention(name, q, k, v, causal=True)
    assert_same(output, attention(name, *cast([q, k, v]), causal=True))


@pytest.mark.parametrize("dtypes", REFUSED, ids=str)
def test_mixtures_with_float64_are_refused_as_torch_does(dtypes: tuple[torch.dtype, ...]) -> None:
    q, k, v = mixed(dtypes)
    with torch.autocast("cpu", BFLOAT16):
        with pytest.raises(RuntimeError, match="same dtype"):
            scaled_dot_product_attention(q, k, v)
        with pytest.raises(UserError, match="must share one dtype"):
            relu_attention(q, k, v)


@pytest.fixture
def on_another_device() -> Iterator[None]:
    """Autocast for CUDA, which `torch.autocast` does not enable on a machine without a GPU."""
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.usefixtures("on_another_device")
@pytest.mark.parametrize("is_nested", [False, True])
def test_without_autocast_mixed_dtypes_are_one_sentence(is_nested: bool) -> None:
    q, k, v = mixed(MIXTURES[0])
    outer = torch.autocast("cpu", BFLOAT16) if is_nested else nullcontext()
    with outer, torch.autocast("cpu", enabled=False):
        with pytest.raises(UserError, match=r"must share one dtype .* and torch\.bfloat16$"):
            relu_attention(q, k, v)
        with pytest.raises(UserError, match="must share one dtype"):
            relu_attention(q, k, v, check=True)


def test_contents_are_checked_after_the_cast() -> None:
    q, k, v = mixed(MIXTURES[0])
    with torch.autocast("cpu", BFLOAT16):
        assert relu_attention(q, k, v, check=True).dtype is BFLOAT16
        v[0, 0, 0, 0] = torch.nan
        with pytest.raises(UserError, match="v must be finite"):
            attention("relu_n", q, k, v, check=True)


def test_values_that_are_not_tensors_are_refused_as_before() -> None:
    q, k, v = mixed(MIXTURES[1])
    with torch.autocast("cpu", BFLOAT16):
        for arguments, name in (((None, k, v), "q"), ((q, k, [1.0]), "v")):
            with pytest.raises(UserError, match=f"{name} must be a tensor of shape"):
                relu_attention(*arguments)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="must share one dtype"):
            relu_attention(q.long(), k.long(), v.long())


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_gradients_have_the_dtypes_of_the_inputs(impl: str) -> None:
    options: dict[str, Any] = {"power": 4, "row_normalise": 1e-4, "impl": impl}
    inputs = mixed(MIXTURES[0], requires_grad=True)
    threshold = torch.full((4,), -1.0, requires_grad=True)
    with torch.autocast("cpu", BFLOAT16):
        result = relu_attention(*inputs, threshold=threshold, return_sums="row_sum", **options)
    assert result.sums.row_sum.dtype is FLOAT32
    (result.output.float().square().sum() + result.sums.row_sum.sum()).backward()
    assert [t.grad.dtype for t in (*inputs, threshold)] == [*MIXTURES[0], FLOAT32]
    plain = [t.requires_grad_() for t in cast(inputs)]
    same = threshold.detach().clone().requires_grad_()
    expected = relu_attention(*plain, threshold=same, return_sums="row_sum", **options)
    (expected.output.float().square().sum() + expected.sums.row_sum.sum()).backward()
    assert_same(result.output, expected.output)
    for ours, theirs in zip([*inputs, threshold], [*plain, same], strict=True):
        assert_same(ours.grad.float(), theirs.grad.float())


def test_thresholds_are_not_rounded() -> None:
    q, k, v = mixed(MIXTURES[1])
    threshold = torch.full((4,), -1.001)
    with torch.autocast("cpu", BFLOAT16):
        output = relu_attention(q, k, v, threshold=threshold, impl="reference")
        sums = relu_attention(q, k, v, threshold=threshold, return_sums="row_sum").sums.row_sum
        rounded = relu_attention(
            q, k, v, threshold=threshold.bfloat16(), return_sums="row_sum"
        ).sums.row_sum
    assert not torch.equal(sums, rounded)
    plain = relu_attention(*cast([q, k, v]), threshold=threshold, impl="reference")
    assert_same(output, plain)


def test_packed_sequences() -> None:
    ends = torch.tensor([0, 2, 5])
    q, k, v = (t[0, :, [0, 1, 2, 0, 1]].transpose(0, 1) for t in mixed(MIXTURES[0]))
    with torch.autocast("cpu", BFLOAT16):
        output = relu_attention_varlen(q, k, v, ends, ends, 3, 3, causal=True)
    expected = relu_attention_varlen(*cast([q, k, v]), ends, ends, 3, 3, causal=True)
    assert_same(output, expected)
    with pytest.raises(UserError, match="must share one dtype"):
        relu_attention_varlen(q, k, v, ends, ends, 3, 3)


@pytest.mark.parametrize("stored", [BFLOAT16, FLOAT32])
def test_a_paged_cache_keeps_its_dtype(stored: torch.dtype) -> None:
    q, k, v = mixed(MIXTURES[0])
    outputs = []
    for is_enabled in (True, False):
        cache = PagedCache(2, 4, 8, value_width=6, pages=2, page_size=16, dtype=stored)
        with torch.autocast("cpu", BFLOAT16, enabled=is_enabled):
            tensors = (q, k, v) if is_enabled else [t.to(stored) for t in (q, k, v)]
            cache.append(*tensors[1:])
            outputs.append(decode_attention(tensors[0][:, :, -1:], cache))
    assert outputs[0].dtype is stored
    torch.testing.assert_close(*outputs, atol=0.02, rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normalised_relu", "softmax"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_compiles_to_one_graph(name: str, is_inside: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", BFLOAT16) if is_inside else nullcontext():
            return attention(name, q, k, v, causal=True)

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs = mixed(MIXTURES[0], requires_grad=True)
    with torch.autocast("cpu", BFLOAT16):
        output = compiled(*inputs)
    output.float().square().sum().backward()
    assert output.dtype is BFLOAT16
    assert [t.grad.dtype for t in inputs] == list(MIXTURES[0])
    expected = attention(name, *cast(inputs), causal=True)
    torch.testing.assert_close(output, expected, atol=0.02, rtol=0.02)
    if not is_inside:
        # The state of autocast is guarded.
        assert compiled(*mixed(MIXTURES[1])).dtype is FLOAT32


def test_transforms() -> None:
    q, k, v = mixed(MIXTURES[0])

    def attend(q: Tensor) -> Tensor:
        return relu_attention(q, k, v, causal=True)

    with torch.autocast("cpu", BFLOAT16):
        expected = attend(q)
        batched = torch.func.vmap(attend)(torch.stack([q, q]))
        gradient = torch.func.grad(lambda q: attend(q).float().square().sum())(q)
        _, tangent = torch.func.jvp(attend, (q,), (torch.ones_like(q),))
    torch.testing.assert_close(batched[1], expected, atol=0.02, rtol=0.02)
    assert (batched.dtype, gradient.dtype, tangent.dtype) == (BFLOAT16, FLOAT32, BFLOAT16)
    wide = q.clone().requires_grad_()
    with torch.autocast("cpu", BFLOAT16):
        attend(wide).float().square().sum().backward()
    torch.testing.assert_close(gradient, wide.grad, atol=0.05, rtol=0.05)
