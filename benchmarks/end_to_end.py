"""Whole training steps of the recipes against unpadded softmax on its fastest kernel.

    python -m benchmarks.end_to_end --out end-to-end.json
    TRITON_INTERPRET=1 python -m benchmarks.end_to_end --quick --out end-to-end.json

Steps run as in `reluformer train`: dropout, losses, optimiser and CUDA graphs are the recipe's.
Batches have no padding, and no model receives lengths. The models of a row take steps in
interleaved rounds. Uncompiled steps are timed with both kernels of softmax, cuDNN and flash, one of
which is SDPA's own choice; compiled steps with the faster one.

ms, share           time of a step, and the part of it that the attention calls take alone
x opponent          median over the rounds of the fastest softmax / ours
x attention         the same for the attention calls alone, forward and backward
no attention        ceiling: x opponent if our attention took no time
as alone            ceiling: x opponent if only the attention calls changed, by x attention
apart               largest difference between losses of the kernels and of the reference in
                    bfloat16, without dropout
rounding            the same between the reference in float32 and in bfloat16: the effect of
                    bfloat16 on the rest of the model
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.end_to_end_model import (
    CUDNN,
    FLASH,
    OURS,
    REFERENCE,
    SDPA,
    VOCABULARIES,
    YARDSTICK,
    Case,
    Contestant,
    Plan,
    sdpa_choice,
)
from benchmarks.whole_steps import ceilings, interleaved
from reluformer.bench.timing import Clock, in_short, ratio
from reluformer.config.train import TrainConfig
from reluformer.files import write_json
from reluformer.info import commit, info
from reluformer.processes import Processes, processes
from reluformer.train.torch_settings import torch_settings

Row = dict[str, Any]
GPU = Plan("cuda", (512, 1024, 4096), 16_384, 30_000, 12, ("train.precision=bfloat16",))
# Tests this script on a CPU; Triton's interpreter cannot multiply bfloat16.
TINY = ("train.device=cpu", "train.precision=float32", "model.width=32", "model.heads=2",
        "model.slots=32", "model.encoder_layers=1", "model.decoder_layers=1")  # fmt: skip
TOY = Plan("cpu", (16,), 32, 50, 2, TINY)
AGREEMENT_TOKENS, AGREEMENT_STEPS = 4096, 6
WARM_UP_PROCESSES, WARM_UP_SECONDS = 8, 120


def cases(recipes: Sequence[str], lengths: Sequence[int], compiled: bool) -> Iterator[Case]:
    """All cases in order of importance; a compiled case follows its uncompiled one."""
    for recipe in recipes:
        yield from (Case(recipe, length) for length in lengths)
        if compiled:
            yield from (Case(recipe, length, True) for length in reversed(lengths))


def warm(recipe: str, length: int, is_compiled: bool, run: str) -> None:
    """Take one step, which leaves compiled kernels in the caches on disk."""
    # The code of compiled layers depends on the size of a batch, our kernels do not.
    plan = GPU if is_compiled else GPU._replace(tokens=GPU.tokens // 2)
    case = Case(recipe, length, is_compiled)
    with processes(plan.device) as group, torch_settings(TrainConfig(), group.device):
        Contestant(case, run, plan, group).steps(1)


def warm_up(recipes: Sequence[str], lengths: Sequence[int], compiled: bool) -> None:
    """Compile what the cases need, in parallel processes; failures show in the timed runs."""
    jobs = []
    for recipe in recipes:
        # Compiled layers serve all lengths, except one that equals the width of the model (512),
        # which becomes a constant; the kernels of our attention serve few lengths.
        both = lengths[:2] if compiled else ()
        jobs += [(recipe, length, length in both, OURS) for length in lengths]
        jobs += [(recipe, length, True, CUDNN) for length in both]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}

    def start(job: tuple[Any, ...]) -> None:
        code = f"from benchmarks.end_to_end import warm; warm(*{job!r})"
        try:
            subprocess.run(
                [sys.executable, "-c", code], env=environment, timeout=WARM_UP_SECONDS,
                check=True, capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.SubprocessError as problem:
            reason = str(getattr(problem, "stderr", "") or problem).strip().splitlines()[-1]
            print(f"not compiled: {job}: {reason}", flush=True)

    with ThreadPoolExecutor(WARM_UP_PROCESSES) as pool:
        list(pool.map(start, jobs))


def prepare(
    case: Case, runs: Sequence[str], plan: Plan, group: Processes
) -> tuple[dict[str, Contestant], dict[str, str]]:
    """The contestants of a case by run, ready to be timed, and the errors of those that failed."""
    ready, failed = {}, {}
    for run in runs:
        try:
            contestant = Contestant(case, run, plan, group)
            contestant.warm_up()
            ready[run] = contestant
        except Exception as problem:
            failed[run] = in_short(problem)
    return ready, failed


def attention_times(contestants: dict[str, Contestant], plan: Plan) -> dict[str, float]:
    """Milliseconds that the attention calls of a step take alone, by run."""
    calls = {run: contestant.attention_calls() for run, contestant in contestants.items()}
    functions = {
        f"{run}, {kind}": function
        for run, kinds in calls.items()
        for kind, (_, function) in kinds.items()
    }
    times = Clock(plan.device).all_rounds(functions, plan.rounds)
    return {
        run: sum(
            count * statistics.median(times[f"{run}, {kind}"]) for kind, (count, _) in kinds.items()
        )
        for run, kinds in calls.items()
    }


def measure(case: Case, runs: Sequence[str], plan: Plan, group: Processes) -> list[Row]:
    """One row for each run of a case."""
    ready, failed = prepare(case, runs, plan, group)
    times = interleaved({run: each.milliseconds for run, each in ready.items()}, plan.rounds)
    alone = attention_times(ready, plan)
    head = head_of(case)
    rows: list[Row] = [{**head, "run": run, "failed": reason} for run, reason in failed.items()]
    for run, contestant in ready.items():
        ms = statistics.median(times[run])
        row = {**head, "run": run, "ms": ms, "tokens_per_second": plan.tokens / ms * 1e3}
        row |= {"peak_gib": contestant.peak_gib, "attention_ms": alone[run]}
        rows.append({**row, "share": alone[run] / ms})
    by_run = {row["run"]: row for row in rows if "ms" in row}
    opponents = [run for run in by_run if run != OURS]
    if OURS in by_run and opponents:
        best = min(opponents, key=lambda run: by_run[run]["ms"])
        by_run[OURS] |= compare(by_run[OURS], by_run[best], ratio(times[OURS], times[best]))
        if group.device.type == "cuda":
            by_run[OURS]["sdpa_choice"] = sdpa_choice(ready[OURS].model, plan, case.length)
    return rows


def attempt(case: Case, runs: Sequence[str], plan: Plan, group: Processes) -> list[Row]:
    """The rows of `measure`, or one row with the error."""
    try:
        return measure(case, runs, plan, group)
    except Exception as problem:
        return [{**head_of(case), "run": OURS, "failed": in_short(problem)}]


def head_of(case: Case) -> Row:
    """The fields by which the rows of a case are found."""
    return {"recipe": case.recipe, "length": case.length, "compiled": case.is_compiled}


def compare(ours: Row, best: Row, speed_up: float) -> Row:
    """Our row's comparison with the fastest opponent; see the head of this file."""
    as_alone, no_attention = ceilings(best["ms"], best["attention_ms"], ours["attention_ms"])
    return {
        "opponent": best["run"],
        "x_opponent": speed_up,
        "x_memory": ours["peak_gib"] / best["peak_gib"] if best["peak_gib"] else 1.0,
        "x_attention": best["attention_ms"] / ours["attention_ms"],
        "ceiling_no_attention": no_attention,
        "ceiling_as_alone": as_alone,
    }


def agreement(recipe: str, plan: Plan, group: Processes) -> Row:
    """Differences between the losses of the kernels and those of the reference."""
    length, settings = plan.lengths[0], (*plan.settings, "model.dropout=0.0", "train.graphs=false")
    small = plan._replace(tokens=min(plan.tokens, AGREEMENT_TOKENS), settings=settings)
    start: dict[str, Tensor] | None = None
    losses: dict[str, Tensor] = {}
    for run in (REFERENCE, YARDSTICK, OURS):
        contestant = Contestant(Case(recipe, length), run, small, group, start)
        start = start or {n: t.clone() for n, t in contestant.model.state_dict().items()}
        losses[run] = torch.stack(contestant.steps(AGREEMENT_STEPS))
    apart, rounding = (
        float((losses[run] - losses[REFERENCE]).abs().max()) for run in (OURS, YARDSTICK)
    )
    return {"recipe": recipe, "length": length, "apart": apart, "rounding": rounding}


def opponents_of(case: Case, rows: list[Row], plan: Plan) -> list[str]:
    """Runs of softmax that a case is timed against."""
    if plan.device == "cpu":
        return [SDPA]
    head = head_of(case._replace(is_compiled=False))
    before = [row["opponent"] for row in rows if "opponent" in row and head.items() <= row.items()]
    return before if case.is_compiled and before else [CUDNN, FLASH]


def table(rows: list[Row]) -> str:
    """The results as a text table."""
    forms = {"ms": ".2f", "tokens_per_second": ",.0f", "peak_gib": ".1f", "share": ".1%",
             "x_opponent": ".3f", "x_memory": ".2f", "x_attention": ".2f",
             "ceiling_no_attention": ".2f", "ceiling_as_alone": ".2f"}  # fmt: skip
    titles = ("ms", "tokens/s", "GiB", "share", "x opponent", "x memory", "x attention",
              "no attention", "as alone")  # fmt: skip
    lines = [f"{'recipe':9} length {'':8} {'run':15}" + "".join(f"{each:>13}" for each in titles)]
    for row in rows:
        cells = [
            f"{format(row[name], form) if name in row else '':>13}" for name, form in forms.items()
        ]
        compiled = "compiled" if row["compiled"] else "eager"
        lines.append(
            f"{row['recipe']:9} {row['length']:6} {compiled:8} {row['run']:15}"
            f"{row.get('failed', ''.join(cells))[:130]}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure all cases within the time limit, write JSON after each and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=240.0, help="no case starts after this")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--recipes", nargs="+", choices=VOCABULARIES, default=[*VOCABULARIES])
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 512 1024 4096")
    parser.add_argument("--quick", action="store_true", help="toy sizes on a CPU")
    options = parser.parse_args()
    begin = time.monotonic()
    plan = TOY if options.quick else GPU
    plan = plan._replace(lengths=tuple(options.lengths or plan.lengths))
    compiled = options.compile and plan.device == "cuda"
    rows: list[Row] = []
    agreements: list[Row] = []
    left: list[Row] = []
    report: dict[str, Any] = {"commit": commit(), "machine": info(), "plan": plan._asdict()}
    report |= {"rows": rows, "agreement": agreements, "left_out": left}

    def write(done: str) -> None:
        elapsed = time.monotonic() - begin
        write_json(options.out, {**report, "seconds": elapsed})
        print(f"{elapsed:5.0f} s: {done}", flush=True)

    if plan.device == "cuda":
        warm_up(options.recipes, plan.lengths, compiled)
        write("compiled")
    with processes(plan.device) as group, torch_settings(TrainConfig(), group.device):
        for case in cases(options.recipes, plan.lengths, compiled):
            if time.monotonic() - begin > options.seconds:
                left.append(case._asdict())
                continue
            # Compiled code has the kernel that SDPA took when it was traced.
            torch.compiler.reset()
            rows += attempt(case, [OURS, *opponents_of(case, rows, plan)], plan, group)
            gc.collect()
            torch.cuda.empty_cache()
            write(", ".join(map(str, case)))
        for recipe in options.recipes:
            agreements.append(agreement(recipe, plan, group))
            write(f"{recipe}, agreement")
    print(table(rows))
    for row in agreements:
        print(f"{row['recipe']}: apart {row['apart']:.1e}, rounding {row['rounding']:.1e}")
    if left:
        print(f"no time for {len(left)} cases")


if __name__ == "__main__":
    main()
