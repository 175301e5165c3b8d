"""The kernels on a GPU (`pytest -m gpu`): all tiles of the table, dtypes and realistic lengths."""

from dataclasses import replace

import pytest
import torch

from reluformer import relu_attention
from reluformer.errors import UserError
from reluformer.ops import signature
from reluformer.ops.backends.triton import launch, op, run_backward, tuning
from reluformer.ops.stats import sampled_rows
from tests.ops.backends.triton.test_op import _check_compiled, _check_dropout, _varlen
from tests.ops.rectified import CASES, Arguments, Case, arguments, check, found, run_kernel

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
    check_or_refusal(case, dtype)


def check_or_refusal(case: Case, dtype: torch.dtype) -> None:
    """Compare with the formula, or expect an error for powers that float16 cannot represent."""
    given = arguments(case, dtype, "cuda")
    if case.power <= 2 or dtype != torch.float16:
        check(op.attend, given, *LOOSE[dtype])
        return
    q, k, v = (given.leaves[name] for name in "qkv")
    with pytest.raises(UserError, match="needs bfloat16 or float32"):
        relu_attention(q, k, v, power=case.power, impl="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", op.WIDTHS)
@pytest.mark.parametrize("kernel", ["forward", "dkv", "dq"])
def test_every_tile(kernel: tuning.Kernel, width: int, dtype: torch.dtype) -> None:
    padded = 128 if width == 96 else width
    shape = Case("tile", batch=2, queries=283, keys=301, width=width, value_width=width)
    for tile in tuning.every(kernel, padded, dtype.itemsize):
        for case in (shape, replace(shape, causal=True), replace(shape, key_lengths=(301, 77))):
            # Pointers once per tile: they share everything but the loads.
            for tma in (None, False) if case.causal else (None,):
                with tuning.override({kernel: tile}, tma=tma):
                    given = arguments(case, dtype, "cuda", transposed=tma is None)
                    check(op.attend, given, *BOUNDS[dtype])
            divided = replace(case, row_normalise=0.01)
            with tuning.override({kernel: tile}):
                check(op.attend, arguments(divided, dtype, "cuda"), *LOOSE[dtype])


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_sampled_entropies_equal_the_full_ones(width: int, causal: bool) -> None:
    case = Case("sampled", batch=2, queries=700, keys=700, width=width, value_width=width)
    case = replace(case, causal=causal, gamma=True, statistics=2)
    given = arguments(case, torch.bfloat16, "cuda")
    q, k, v = (given.leaves[name] for name in "qkv")
    results = []
    for every in (1, 2):
        out, row_sum, log_sum = run_kernel(
            op.attend, q, k, v, {**given.options, "entropy_every": every}
        )
        assert row_sum is not None and log_sum is not None
        log_sum = log_sum * sampled_rows(*log_sum.shape, 2, q.device)
        made = [out.float(), row_sum, log_sum]
        leaves = [q, k, v, given.leaves["gamma"]]
        grads = torch.autograd.grad(made, leaves, [torch.ones_like(each) for each in made])
        results.append([*made, *grads])
    for all_rows, some in zip(*results, strict=True):
        error = (all_rows.double() - some.double()).norm() / all_rows.double().norm()
        assert float(error) <= LOOSE[torch.bfloat16][1]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("row_normalise", [None, 0.1])
def test_packed_sequences(dtype: torch.dtype, row_normalise: float | None) -> None:
    results = _varlen(dtype, row_normalise)
    _, bound = LOOSE[dtype]
    for actual, wanted in zip(results["found"], results["wanted"], strict=True):
        assert float((actual.double() - wanted).norm() / wanted.norm()) <= bound


@pytest.mark.parametrize(("power", "row_normalise"), [(1, None), (4, None), (4, 0.1)])
def test_dropout_is_the_same_forward_and_backward(power: int, row_normalise: float | None) -> None:
    _check_dropout(power, row_normalise)


def _medium(row_normalise: float | None) -> Arguments:
    case = Case("medium", batch=2, heads=4, queries=700, keys=700, width=64, value_width=64)
    case = replace(case, causal=True, gamma=True, row_normalise=row_normalise)
    return arguments(case, torch.bfloat16, "cuda")


either = pytest.mark.parametrize("row_normalise", [None, 0.01], ids=["plain", "row-normalised"])


@either
def test_compiled_without_a_graph_break(row_normalise: float | None) -> None:
    _check_compiled(_medium(row_normalise), "inductor")


@either
def test_direct_launches_repeat_the_first_launch_bit_by_bit(row_normalise: float | None) -> None:
    # Other tests may have left launches that failed.
    launch.LAUNCHES.clear()
    run_backward.BACKWARD_LAUNCHES.clear()
    given = _medium(row_normalise)
    first, second, third = (found(op.attend, given) for _ in range(3))
    assert all(each.direct is not None for each in launch.LAUNCHES.values())
    launches = [each for pass_ in run_backward.BACKWARD_LAUNCHES.values() for each in pass_]
    assert all(each.direct is not None for each in launches if isinstance(each, launch.Launch))
    for later in (second, third):
        assert torch.equal(first[0][0], later[0][0])
        assert all(torch.equal(first[1][name], later[1][name]) for name in first[1])


@pytest.mark.parametrize("width", [64, 128])
@either
def test_repeated_calls_are_prepared_and_equal_bit_by_bit(
    width: int, row_normalise: float | None
) -> None:
    signature.CHOICES.clear()
    q, k, v = (
        torch.randn(4, 16, 1024, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    )
    threshold = torch.full((16,), -1.0, device="cuda", requires_grad=True)
    gamma = torch.full((16,), 2.0, device="cuda", requires_grad=True)
    results = []
    for _ in range(4):
        out = relu_attention(
            q, k, v, threshold=threshold, gamma=gamma, row_normalise=row_normalise, impl="triton"
        )
        grads = torch.autograd.grad(out, [q, k, v, threshold, gamma], q.detach())
        results.append([out, *grads])
    (choice,) = signature.CHOICES.values()
    assert choice.prepared is not None
    for later in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], later, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_on_another_device_than_the_current_one() -> None:
    case = Case("device", causal=True, width=64, value_width=64)
    check(op.attend, arguments(case, torch.bfloat16, "cuda:1"), *LOOSE[torch.bfloat16])


@either
def test_captured_in_a_graph(row_normalise: float | None) -> None:
    given = _medium(row_normalise)
    q, k, v = (given.leaves[name].detach() for name in "qkv")
    given.options["gamma"] = given.options["gamma"].detach()
    wanted = run_kernel(op.attend, q, k, v, given.options)[0]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run_kernel(op.attend, q, k, v, given.options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_kernel(op.attend, q, k, v, given.options)[0]
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, wanted)


def test_new_lengths_do_not_compile_again() -> None:
    from reluformer.ops.backends.triton.portable.forward import forward_kernel

    def kernels() -> int:
        return sum(len(cache[0]) for cache in forward_kernel.device_caches.values())

    for length in (300, 301, 16, 1):
        case = Case("length", queries=length, keys=length, width=64, value_width=64)
        given = arguments(case, torch.bfloat16, "cuda")
        found(op.attend, given)
        if length == 300:
            before = kernels()
    assert kernels() == before
