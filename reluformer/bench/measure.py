"""The run: check all implementations, then time those that passed, case by case."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.bench.cases import Case, Mode, Plan, plan
from reluformer.bench.contestant import Contestant, Context
from reluformer.bench.contestants import contestants
from reluformer.bench.features import PLAIN
from reluformer.bench.gate import check_all, cotangents
from reluformer.bench.report import MATMUL, Report, Row
from reluformer.bench.timing import Call, Clock, OutOfTime, Times, in_short, ratio
from reluformer.errors import UserError

Progress = Callable[[int, int | None, str], None]
Save = Callable[[Report], None]

_MAX_INPUT_SETS = 16
_MOST_THREADS = 4096


class Selection(NamedTuple):
    """The cases that a user selects."""

    device: str | None = None
    """"cpu" or "cuda"; None for a GPU if there is one."""
    dtypes: tuple[str, ...] = ()
    """Names of dtypes; empty for the defaults of the device."""
    only: tuple[str, ...] = ()
    """Patterns of case names; empty for all cases."""
    quick: bool = False
    """Whether to run tiny cases that only test the benchmark."""


def run(
    selection: Selection,
    *,
    threads: int | None = None,
    seconds: float,
    command: str = "",
    progress: Progress = lambda done, total, doing: None,
    save: Save = lambda report: None,
) -> Report:
    """Measure the selected cases; the other arguments are those of `measure`.

    Raises:
        UserError: If an argument is out of range or the device is missing.
    """
    if not seconds > 0:
        raise UserError(f"seconds must be above 0, got {seconds:g}")
    if threads is not None:
        if not 1 <= threads <= _MOST_THREADS:
            raise UserError(f"threads must be from 1 to {_MOST_THREADS}, got {threads}")
        torch.set_num_threads(threads)
    device = selection.device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UserError("device must be cpu, because torch finds no GPU; got cuda")
    chosen = plan(device, selection.dtypes, selection.quick).selected(selection.only)
    return measure(chosen, seconds=seconds, command=command, progress=progress, save=save)


def measure(
    chosen: Plan,
    *,
    seconds: float,
    command: str = "",
    progress: Progress = lambda done, total, doing: None,
    save: Save = lambda report: None,
) -> Report:
    """Run a plan.

    Args:
        chosen: Cases and settings of the timing.
        seconds: Approximate time limit; cases beyond it are skipped.
        command: Command line, for the report.
        progress: Called with finished passes, all passes, and the current activity.
        save: Called with the growing report.
    """
    start = time.monotonic()
    report = Report.begin(command, chosen.cases)
    save(report)
    # Without workers, checking all cases first would gain nothing and might use up the time.
    batches = [chosen.cases] if chosen.workers else [(case,) for case in chosen.cases]
    total, done = sum(len(case.modes) for case in chosen.cases), 0

    def left() -> float:
        return seconds - (time.monotonic() - start)

    for batch in batches:
        if left() <= 0:
            report.skipped |= {case.name: "time was up" for case in batch}
            continue
        for count, check in enumerate(check_all(batch, chosen.workers)):
            report.checks.append(check)
            doing = f"checked {count + 1} kernels" if chosen.workers else f"checking {check.case}"
            progress(done, total, doing)
        save(report)
        for case in batch:
            passed = {c.name for c in report.checks if c.case == case.name and c.passed}
            entrants = [entrant for entrant in contestants(case).values() if entrant.name in passed]
            for mode in case.modes:
                progress(done, total, f"{case.name}, {mode}")
                report.rows += _timed(chosen, case, mode, entrants, left, report.skipped)
                done += 1
            report.seconds = time.monotonic() - start
            save(report)
    return report


def _timed(
    plan: Plan,
    case: Case,
    mode: Mode,
    entrants: list[Contestant],
    left: Callable[[], float],
    skipped: dict[str, str],
) -> list[Row]:
    """Rows of one pass; if it cannot be timed, no rows and the reason in `skipped`."""
    label = f"{case.name}, {mode}"
    if left() <= 0:
        skipped[label] = "time was up"
        return []
    try:
        rows, left_out = _Pass(plan, case, mode, entrants).rows(left())
        skipped |= {f"{label}, {name}": reason for name, reason in left_out.items()}
        return rows
    except OutOfTime as problem:
        skipped[label] = str(problem)
    except Exception as problem:
        # A failure, such as no memory for the matrix product, must not end the other passes.
        skipped[label] = in_short(problem)
    if case.device == "cuda":
        torch.cuda.empty_cache()
    return []


@dataclass(frozen=True)
class _Pass:
    """One pass of one case by all implementations that passed the check."""

    plan: Plan
    case: Case
    mode: Mode
    entrants: Sequence[Contestant]

    def rows(self, left: float) -> tuple[list[Row], dict[str, str]]:
        """Rows, and the reason for each implementation that failed or was too slow."""
        clock = Clock(self.case.device)
        calls: dict[str, Call] = {}
        failed: dict[str, str] = {}
        for entrant in self.entrants:
            try:
                calls[entrant.name] = _within(entrant.context, self._call(entrant, clock))
            except Exception as problem:
                failed[entrant.name] = in_short(problem)
        size, dtype = self.plan.matmul, getattr(torch, self.case.dtype)
        a, b = (torch.randn(size, size, device=self.case.device).to(dtype) for _ in range(2))
        calls[MATMUL] = lambda: a @ b
        times = clock.rounds(calls, self.plan.rounds, self.plan.row_seconds, left, yardstick=MATMUL)
        kinds = {entrant.name: entrant.kind for entrant in self.entrants if entrant.name in times}
        rows = summarise(
            self.case,
            self.mode,
            kinds,
            times,
            matmul_flops=2.0 * size**3,
            host=clock.host,
            peaks={name: clock.peak(calls[name]) for name in kinds},
            work={entrant.name: entrant.work for entrant in self.entrants},
        )
        return rows, failed | clock.left_out

    def _call(self, contestant: Contestant, clock: Clock) -> Call:
        case, run = contestant.case, contestant.run
        sets = [case.inputs(seed) for seed in range(_input_sets(case, clock.cache_size()))]
        for q, k, v, _ in sets:
            for leaf in (q, k, v):
                leaf.requires_grad_(self.mode in ("backward", "both"))
        if self.mode == "backward":
            *leaves, grad = sets[0]
            outputs = run(*leaves)
            grads = cotangents(grad, outputs)
            return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
        turns = cycle(sets)

        def forward() -> None:
            with torch.no_grad():
                run(*next(turns)[:3])

        def both() -> tuple[Tensor, ...]:
            *leaves, grad = next(turns)
            outputs = run(*leaves)
            return torch.autograd.grad(outputs, leaves, cotangents(grad, outputs))

        return both if self.mode == "both" else forward


def _within(context: Context | None, call: Call) -> Call:
    """The call in a context, which every call enters anew."""
    if context is None:
        return call

    def run() -> object:
        with context():
            return call()

    return run


def _input_sets(case: Case, cache: int) -> int:
    """Number of input sets that take turns, so that k and v are read from memory."""
    return max(1, min(_MAX_INPUT_SETS, math.ceil(2 * cache / case.cache_bytes)))


def summarise(
    case: Case,
    mode: Mode,
    kinds: dict[str, str],
    times: Times,
    *,
    matmul_flops: float,
    host: dict[str, float],
    peaks: dict[str, float],
    work: dict[str, float] | None = None,
) -> list[Row]:
    """Rows of one pass.

    Args:
        case: The case.
        mode: The pass.
        kinds: Attention of each implementation, by name, without the matrix product.
        times: Milliseconds of all rounds, by name, with the matrix product.
        matmul_flops: FLOPs of the matrix product.
        host: Host microseconds by name.
        peaks: Peak MiB by name.
        work: FLOPs as a share of the case's, by name; 1 where missing.
    """
    median = {name: statistics.median(rounds) for name, rounds in times.items()}
    softmax = [name for name, kind in kinds.items() if kind == "softmax"]
    best = min(softmax, key=median.__getitem__, default=None)
    flops = case.flops(mode)

    def figures(name: str, rounds: list[float]) -> dict[str, float]:
        if name == MATMUL:
            return {"tflops": matmul_flops / median[name] / 1e9}
        if case.group == "features":
            share = (work or {}).get(name, 1.0)
            return {"relative": ratio(times[PLAIN], rounds) / share} if PLAIN in times else {}
        of_matmul = ratio(rounds, times[MATMUL]) * flops / matmul_flops
        rates = {"tflops": flops / median[name] / 1e9, "of_matmul": of_matmul}
        if best is not None:
            rates["x_softmax"] = ratio(rounds, times[best])
        if mode == "decode":
            rates["gbytes"] = case.cache_bytes / median[name] / 1e6
        return rates

    return [
        Row(
            case.name,
            mode,
            name,
            kinds.get(name, MATMUL),
            ms=median[name],
            low=min(rounds),
            high=max(rounds),
            pairs=len(rounds),
            host_us=host.get(name),
            peak_mib=peaks.get(name),
            **figures(name, rounds),
        )
        for name, rounds in times.items()
    ]
