"""Nobody is timed before agreeing with float64, at the very shape that is timed.

The formula is evaluated in float64 for the first head of the first sequence and the last head of
the last one, outputs and all gradients, on normal inputs and, for ReLU attention, in the hard
regime of `Case.inputs`.
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
from reluformer.bench.contestants import Contestant, contestants
from reluformer.ops import attention
from reluformer.ops.stats import sampled_rows
from reluformer.ops.visibility import Visibility

# Largest relative error of outputs, of gradients, and of either in the hard regime. Kernels on a
# CPU keep partial sums in bfloat16.
_BOUNDS = {
    ("cuda", "bfloat16"): (3e-3, 6e-3, 1e-2),
    ("cuda", "float16"): (1e-3, 2e-3, 4e-3),
    ("cuda", "float32"): (1e-5, 2e-5, 1e-4),
    ("cpu", "bfloat16"): (1e-2, 1e-2, 1e-2),
    ("cpu", "float16"): (1e-2, 1e-2, 1e-2),
    ("cpu", "float32"): (1e-5, 2e-5, 1e-4),
}
# Statistics, and gradients through them, are sums of rounded terms.
_LOOSER = 3.0

# The slope of a ReLU jumps at 0. Of scores in float32 a few in ten million fall on the other side,
# and bring or take a whole term of dq and dk: relative to all terms, the root of that share. (Half
# precision has larger errors of its own.)
_JUMPS = 1e-3

# Scores that the formula holds at once, in float64.
_CHUNK = 1 << 24

_TINY = 1e-6

_DIED = "process died compiling or running"
_FAULTS = (_DIED, "CUDA error")


@dataclass(frozen=True)
class Check:
    """What the gate says of a contestant: passed, refused, or absent, with the reason."""

    case: str
    name: str
    errors: dict[str, float] = field(default_factory=dict)
    """Relative errors of `out`, `dq`, `dk`, `dv` and statistics; `hard out` and so on likewise."""
    refused: str | None = None
    absent: str | None = None

    @property
    def passed(self) -> bool:
        """Whether a speed may be printed."""
        return self.refused is None and self.absent is None


def check(case: Case, contestant: Contestant) -> Check:
    """Run a contestant of the case once and compare it with float64."""
    if contestant.absent is not None:
        return Check(case.name, contestant.name, absent=contestant.absent)
    regimes = (False, True) if contestant.kind == "relu" and case.group != "features" else (False,)
    errors: dict[str, float] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for hard in regimes:
                found = errors_of(contestant, hard)
                errors |= {f"hard {name}" if hard else name: each for name, each in found.items()}
        except Exception as problem:
            return Check(case.name, contestant.name, absent=_one_line(problem, said))
    return Check(case.name, contestant.name, errors, _verdict(contestant, errors))


def errors_of(contestant: Contestant, hard: bool) -> dict[str, float]:
    """Relative errors, in the Frobenius norm, of outputs and gradients."""
    case = contestant.case
    given = case.inputs(seed=1, hard=hard)
    *leaves, grad = given
    backward = "both" in case.modes
    for leaf in leaves:
        leaf.requires_grad_(backward)
    outputs = (contestant.without_chance or contestant.run)(*leaves)
    found = list(outputs)
    if backward:
        found += torch.autograd.grad(outputs, leaves, cotangents(grad, outputs))
    names = ["out", "row sums", "w log w"][: len(outputs)] + ["dq", "dk", "dv"]
    wanted = _formula(contestant, [_corners(case, each.detach()) for each in given], backward)
    return {
        name: _error(_corners(case, mine.detach()), true)
        for name, mine, true in zip(names, found, wanted, strict=False)
    }


def cotangents(grad: Tensor, outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """What arrives at the outputs: the given gradient, and ones at the statistics."""
    return [grad, *(torch.ones_like(each) for each in outputs[1:])]


def check_all(cases: Iterable[Case], workers: int) -> Iterator[Check]:
    """Check every contestant of every case; those that compile, in worker processes.

    Workers fill the compilers' caches on disk, so that little is left to compile here.
    """
    here: list[tuple[Case, Contestant]] = []
    there: list[tuple[Case, str]] = []
    for case in cases:
        for each in contestants(case).values():
            if workers and each.compiled and each.absent is None:
                there.append((case, each.name))
            else:
                here.append((case, each))
    elsewhere = in_workers(_check_by_name, there, workers)
    for case, each in here:
        yield check(case, each)
    yield from elsewhere


def in_workers(
    function: Callable[..., Check], jobs: Sequence[tuple[Any, ...]], workers: int
) -> Iterator[Check]:
    """Start `function(*job)` for all jobs, (case, what, ...) each; the iterator waits for results.

    A fault on a GPU spoils its process for the jobs that follow, so whoever met one gets a second
    chance in a process of its own.
    """
    pool = _processes(max(workers, 1))
    pending = [pool.submit(function, *job) for job in jobs]

    def results() -> Iterator[Check]:
        with pool:
            for job, future in zip(jobs, pending, strict=True):
                result = _result(job, future)
                if result.absent is not None and any(sign in result.absent for sign in _FAULTS):
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
        case, what, *_ = job
        return Check(case.name, str(what), absent=f"its {_DIED} it")


def _verdict(contestant: Contestant, errors: dict[str, float]) -> str | None:
    """None, or the worst error by name."""
    case = contestant.case
    forward, backward, hard = _BOUNDS[case.device, case.dtype]
    looser = _LOOSER if contestant.statistics else 1.0
    excess = {}
    for name, value in errors.items():
        plain = backward if name in ("dq", "dk", "dv") else forward
        bound = looser * (hard if name.startswith("hard") else plain)
        if contestant.kind == "relu" and name.endswith(("dq", "dk")):
            bound = max(bound, _JUMPS)
        # NaN compares false, so it is out of bounds.
        if not value <= bound:
            excess[name] = (value / bound, f"error of {name} {value:.1e}, bound {bound:.0e}")
    if not excess:
        return None
    return max(excess.values(), key=lambda each: (each[0] != each[0], each[0]))[1]


def _corners(case: Case, tensor: Tensor) -> Tensor:
    """[2, H', ...] of [B, heads, ...]: one key head, with its queries, of two sequences."""
    group = tensor.shape[1] // case.kv_heads
    return torch.stack([tensor[0, :group], tensor[-1, tensor.shape[1] - group :]])


def _formula(contestant: Contestant, given: list[Tensor], backward: bool) -> list[Tensor]:
    """Outputs, then gradients, of the attention in float64, some rows at a time."""
    case = contestant.case
    q, k, v, grad = (each.double() for each in given)
    options = contestant.options(q.shape[0], q.shape[1])
    mask, lengths, window = (options.pop(n, None) for n in ("mask", "key_lengths", "window"))
    rules = Visibility(mask, case.causal, lengths, window)
    table = rules.table(case.queries, case.keys, q.device)
    if table is not None:
        table = table.expand(q.shape[0], 1, case.queries, case.keys)
    for each in (k, v):
        each.requires_grad_(backward)
    sizes = (case.batch, case.heads, case.queries, contestant.entropy_every)
    sampled = _corners(case, sampled_rows(*sizes, q.device))
    outputs: list[tuple[Tensor, ...]] = []
    parts: list[Tensor] = []
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    step = max(1, _CHUNK // (q.shape[0] * q.shape[1] * case.keys))
    for start in range(0, case.queries, step):
        rows = slice(start, start + step)
        part = q[:, :, rows].detach().requires_grad_(backward)
        seen = None if table is None else table[:, :, rows]
        made = _attend(contestant, part, k, v, seen, options)
        if contestant.entropy_every > 1:
            made = (*made[:2], made[2] * sampled[:, :, rows])
        if backward:
            grads = torch.autograd.grad(made, (part, k, v), cotangents(grad[:, :, rows], made))
            parts.append(grads[0])
            dk += grads[1]
            dv += grads[2]
        outputs.append(tuple(each.detach() for each in made))
    whole = [torch.cat(each, dim=2) for each in zip(*outputs, strict=True)]
    return [*whole, torch.cat(parts, dim=2), dk, dv] if backward else whole


def _attend(
    contestant: Contestant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Output and, if the contestant makes them, statistics, by the reference."""
    options = {"mask": seen, "impl": "reference", **options}
    if not contestant.statistics:
        return (attention(contestant.kind, q, k, v, **options),)
    found = attention(contestant.kind, q, k, v, return_stats=True, **options)
    assert found.stats is not None
    statistics = (found.stats.row_sum, -found.stats.raw_entropy)
    return (found.output, *statistics[: contestant.statistics])


def _error(mine: Tensor, true: Tensor) -> float:
    assert mine.shape == true.shape
    return float((mine.double() - true).norm() / true.norm().clamp(min=_TINY))


def _one_line(problem: Exception, said: list[warnings.WarningMessage]) -> str:
    """The first lines of a problem, and of the warnings that came before it."""
    texts = [str(problem) or type(problem).__name__, *(str(each.message) for each in said)]
    lines = dict.fromkeys(text.strip().splitlines()[0] for text in texts if text.strip())
    return "; ".join(lines)[:300]
