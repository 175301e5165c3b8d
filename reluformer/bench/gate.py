"""Comparison with float64: implementations that exceed the tolerance are not timed.

Outputs and all gradients are compared at the timed shape, for the first head of the first sequence
and the last head of the last sequence. Inputs are normal and, for ReLU attention, also those of the
hard regime of `Case.inputs`.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from reluformer.bench.cases import Case
from reluformer.bench.contestant import Contestant
from reluformer.bench.contestants import contestants
from reluformer.ops import attention
from reluformer.ops.stats import sampled_rows
from reluformer.ops.visibility import Visibility

# Largest relative error of outputs, of gradients, and of both in the hard regime. On a CPU, kernels
# of torch keep partial sums in bfloat16.
_BOUNDS = {
    ("cuda", "bfloat16"): (3e-3, 6e-3, 1e-2),
    ("cuda", "float16"): (1e-3, 2e-3, 4e-3),
    ("cuda", "float32"): (1e-5, 2e-5, 1e-4),
    ("cpu", "bfloat16"): (1e-2, 1e-2, 1e-2),
    ("cpu", "float16"): (1e-2, 1e-2, 1e-2),
    ("cpu", "float32"): (1e-5, 2e-5, 1e-4),
}
# Factor for statistics and gradients through them, which are sums of rounded terms.
_STATISTICS_FACTOR = 3.0
# Factor for powers above 2, which multiply the rounding of scores and products. It allows less than
# twice the error of the eager formula in bfloat16.
_POWER_FACTOR = 5 / 3

# The derivative of ReLU jumps at 0. A few float32 scores in ten million round to the other side and
# add or remove a whole term of dq and dk; the relative error is the square root of their share. The
# tolerance of half precision is larger anyway.
_SLOPE_JUMPS = 1e-3

# Number of scores that the float64 formula holds at once.
_CHUNK_SCORES = 1 << 24

_MIN_NORM = 1e-6

_DIED = "process died compiling or running"
_GPU_FAULTS = (_DIED, "CUDA error")


@dataclass(frozen=True)
class Check:
    """Result of the comparison: passed, refused, or absent with the reason."""

    case: str
    name: str
    errors: dict[str, float] = field(default_factory=dict)
    """Relative errors of `out`, `dq`, `dk`, `dv` and statistics; `hard out` etc. likewise."""
    refused: str | None = None
    absent: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the implementation may be timed."""
        return self.refused is None and self.absent is None


def check(case: Case, contestant: Contestant) -> Check:
    """Run a contestant of the case once and compare it with float64."""
    if contestant.absent is not None:
        return Check(case.name, contestant.name, absent=contestant.absent)
    regimes = (False, True) if contestant.kind == "relu" and case.group != "features" else (False,)
    errors: dict[str, float] = {}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            for hard in regimes:
                prefix = "hard " if hard else ""
                regime_errors = errors_of(contestant, hard)
                errors |= {prefix + name: error for name, error in regime_errors.items()}
        except Exception as problem:
            return Check(case.name, contestant.name, absent=_one_line(problem, warned))
    return Check(case.name, contestant.name, errors, _verdict(contestant, errors))


def errors_of(contestant: Contestant, hard: bool) -> dict[str, float]:
    """Relative errors, in the Frobenius norm, of outputs and gradients."""
    case = contestant.case
    inputs = case.inputs(seed=1, hard=hard)
    *leaves, grad = inputs
    backward = "both" in case.modes
    for leaf in leaves:
        leaf.requires_grad_(backward)
    outputs = (contestant.deterministic_run or contestant.run)(*leaves)
    results = list(outputs)
    if backward:
        results += torch.autograd.grad(outputs, leaves, cotangents(grad, outputs))
    names = ["out", "row sums", "w log w"][: len(outputs)] + ["dq", "dk", "dv"]
    corners = [_corners(case, tensor.detach()) for tensor in inputs]
    expected = _formula(contestant, corners, backward)
    return {
        name: _error(_corners(case, result.detach()), exact)
        for name, result, exact in zip(names, results, expected, strict=False)
    }


def cotangents(grad: Tensor, outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients of the outputs: `grad` for the attention output, ones for the statistics."""
    return [grad, *(torch.ones_like(statistic) for statistic in outputs[1:])]


def check_all(cases: Iterable[Case], workers: int) -> Iterator[Check]:
    """Check all contestants of all cases; contestants that compile run in worker processes.

    Workers fill the compilers' caches on disk, so that this process compiles little.
    """
    local: list[tuple[Case, Contestant]] = []
    remote: list[tuple[Case, str]] = []
    for case in cases:
        for contestant in contestants(case).values():
            if workers and contestant.is_compiled and contestant.absent is None:
                remote.append((case, contestant.name))
            else:
                local.append((case, contestant))
    remote_checks = in_workers(_check_by_name, remote, workers)
    for case, contestant in local:
        yield check(case, contestant)
    yield from remote_checks


def in_workers(
    function: Callable[..., Check], jobs: Sequence[tuple[Any, ...]], workers: int
) -> Iterator[Check]:
    """Start `function(*job)` for all jobs at once; the iterator waits for the results in order.

    A GPU fault breaks its process for later jobs, so a job that reports one is repeated in a fresh
    process. The first two elements of a job are its case and a name.
    """
    pool = _processes(max(workers, 1))
    pending = [pool.submit(function, *job) for job in jobs]

    def results() -> Iterator[Check]:
        with pool:
            for job, future in zip(jobs, pending, strict=True):
                result = _result(job, future)
                if result.absent is not None and any(
                    fault in result.absent for fault in _GPU_FAULTS
                ):
                    with _processes(1) as fresh:
                        result = _result(job, fresh.submit(function, *job))
                yield result

    return results()


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def _check_by_name(case: Case, name: str) -> Check:
    result = check(case, contestants(case)[name])
    torch.cuda.empty_cache()
    return result


def _result(job: tuple[Any, ...], future: "Future[Check]") -> Check:
    try:
        return future.result()
    except BrokenProcessPool:
        case, name, *_ = job
        return Check(case.name, str(name), absent=f"its {_DIED} it")


def _verdict(contestant: Contestant, errors: dict[str, float]) -> str | None:
    """Message about the worst error above its tolerance, or None."""
    case = contestant.case
    forward, backward, hard = _BOUNDS[case.device, case.dtype]
    factor = _POWER_FACTOR if contestant.power > 2 else 1.0
    if contestant.statistics:
        factor = _STATISTICS_FACTOR
    excess = {}
    for name, value in errors.items():
        plain = backward if name in ("dq", "dk", "dv") else forward
        bound = factor * (hard if name.startswith("hard") else plain)
        if contestant.kind == "relu" and name.endswith(("dq", "dk")):
            bound = max(bound, _SLOPE_JUMPS)
        # This form also refuses NaN.
        if not value <= bound:
            excess[name] = (value / bound, f"error of {name} {value:.1e}, bound {bound:.0e}")
    if not excess:
        return None
    # NaN counts as the largest.
    return max(excess.values(), key=lambda item: (item[0] != item[0], item[0]))[1]


def _corners(case: Case, tensor: Tensor) -> Tensor:
    """Take [2, H / Hkv, ...] from [B, H, ...]: the first and the last key head with its queries."""
    group = tensor.shape[1] // case.kv_heads
    return torch.stack([tensor[0, :group], tensor[-1, tensor.shape[1] - group :]])


def _formula(contestant: Contestant, inputs: list[Tensor], backward: bool) -> list[Tensor]:
    """Outputs, then gradients, of the attention in float64, computed in chunks of query rows."""
    case = contestant.case
    q, k, v, grad = (tensor.double() for tensor in inputs)
    options = contestant.options(q.shape[0], q.shape[1])
    mask, lengths, window = (options.pop(n, None) for n in ("mask", "key_lengths", "window"))
    rules = Visibility(mask, case.causal, lengths, window)
    table = rules.table(case.queries, case.keys, q.device)
    if table is not None:
        table = table.expand(q.shape[0], 1, case.queries, case.keys)
    for leaf in (k, v):
        leaf.requires_grad_(backward)
    sizes = (case.batch, case.heads, case.queries, contestant.entropy_every)
    sampled = _corners(case, sampled_rows(*sizes, q.device))
    outputs: list[tuple[Tensor, ...]] = []
    dq: list[Tensor] = []
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    step = max(1, _CHUNK_SCORES // (q.shape[0] * q.shape[1] * case.keys))
    for start in range(0, case.queries, step):
        rows = slice(start, start + step)
        chunk = q[:, :, rows].detach().requires_grad_(backward)
        visible = None if table is None else table[:, :, rows]
        out = _attend(contestant, chunk, k, v, visible, options)
        if contestant.entropy_every > 1:
            out = (*out[:2], out[2] * sampled[:, :, rows])
        if backward:
            grads = torch.autograd.grad(out, (chunk, k, v), cotangents(grad[:, :, rows], out))
            dq.append(grads[0])
            dk += grads[1]
            dv += grads[2]
        outputs.append(tuple(tensor.detach() for tensor in out))
    whole = [torch.cat(chunks, dim=2) for chunks in zip(*outputs, strict=True)]
    return [*whole, torch.cat(dq, dim=2), dk, dv] if backward else whole


def _attend(
    contestant: Contestant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Output of the reference, with the statistics that the contestant returns."""
    options = {"mask": visible, "impl": "reference", **options}
    if not contestant.statistics:
        return (attention(contestant.kind, q, k, v, **options),)
    result = attention(contestant.kind, q, k, v, return_stats=True, **options)
    assert result.stats is not None
    statistics = (result.stats.row_sum, -result.stats.raw_entropy)
    return (result.output, *statistics[: contestant.statistics])


def _error(result: Tensor, exact: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    assert result.shape == exact.shape
    return float((result.double() - exact).norm() / exact.norm().clamp(min=_MIN_NORM))


def _one_line(problem: Exception, warned: list[warnings.WarningMessage]) -> str:
    """First line of an exception and of each warning before it."""
    texts = [str(problem) or type(problem).__name__, *(str(w.message) for w in warned)]
    lines = dict.fromkeys(text.strip().splitlines()[0] for text in texts if text.strip())
    return "; ".join(lines)[:300]
