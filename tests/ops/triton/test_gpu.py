"""The kernels on the device: every tile of the table, every type, real lengths. `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch

from reluformer.ops.triton import op, tiles
from tests.ops.rectified import CASES, Arguments, Case, arguments, check, found
from tests.ops.triton.test_op import _check_dropout, _varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUNDS = {torch.bfloat16: (3e-3, 6e-3), torch.float16: (1e-3, 2e-3), torch.float32: (1e-5, 2e-5)}
# Statistics and per-head gradients come from sums of rounded terms.
LOOSE = {dtype: (3 * forward, 3 * backward) for dtype, (forward, backward) in BOUNDS.items()}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula(case: Case, dtype: torch.dtype) -> None:
    check(op.rectified_attention, arguments(case, dtype, "cuda"), *LOOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", op.WIDTHS)
@pytest.mark.parametrize("kernel", ["forward", "keys", "queries", "fused"])
def test_every_tile(kernel: tiles.Kernel, width: int, dtype: torch.dtype) -> None:
    padded = 128 if width == 96 else width
    shape = Case("tile", batch=2, queries=500, keys=613, width=width, value_width=width)
    for tile in tiles.every(kernel, padded, dtype.itemsize):
        for case in (shape, replace(shape, causal=True), replace(shape, key_lengths=(613, 77))):
            for tma in (None, False):
                with tiles.override({kernel: tile}, tma=tma):
                    given = arguments(case, dtype, "cuda", transposed=tma is None)
                    check(
                        op.rectified_attention,
                        given,
                        *BOUNDS[dtype],
                        deterministic=kernel != "fused",
                    )


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_packed_sequences(dtype: torch.dtype) -> None:
    results = _varlen(dtype)
    _, bound = LOOSE[dtype]
    for actual, wanted in zip(results["found"], results["wanted"], strict=True):
        assert float((actual.double() - wanted).norm() / wanted.norm()) <= bound


def test_dropout_is_the_same_forward_and_backward() -> None:
    _check_dropout()


def _medium() -> Arguments:
    case = Case("medium", batch=2, heads=4, queries=700, keys=700, width=64, value_width=64)
    return arguments(replace(case, causal=True, gamma=True), torch.bfloat16, "cuda")


def test_two_runs_agree_bit_by_bit() -> None:
    given = _medium()
    first, second = (found(op.rectified_attention, given) for _ in range(2))
    assert torch.equal(first[0][0], second[0][0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_compiled_without_a_graph_break() -> None:
    given = _medium()
    q, k, v = (given.leaves[name] for name in "qkv")

    def step(scale: float) -> torch.Tensor:
        options = {**given.options, "scale": scale}
        return op.rectified_attention(q * 1.0, k, v, **options)[0].square().sum()

    plain = torch.autograd.grad(step(0.1), (q, k, v))
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True)(0.1), (q, k, v))
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one, other)


def test_captured_in_a_graph() -> None:
    given = _medium()
    q, k, v = (given.leaves[name].detach() for name in "qkv")
    wanted = op.rectified_attention(q, k, v, **given.options)[0]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op.rectified_attention(q, k, v, **given.options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.rectified_attention(q, k, v, **given.options)[0]
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, wanted)


def test_lengths_do_not_compile_again() -> None:
    from reluformer.ops.triton.forward import forward_kernel

    def kernels() -> int:
        return sum(len(cache[0]) for cache in forward_kernel.device_caches.values())

    for length in (300, 301, 16, 1):
        case = Case("length", queries=length, keys=length, width=64, value_width=64)
        given = arguments(case, torch.bfloat16, "cuda")
        found(op.rectified_attention, given)
        if length == 300:
            before = kernels()
    assert kernels() == before
