"""Repeatability of the kernels: thousands of calls of mixed shapes, compared bit by bit.

    python -m benchmarks.repeat --out repeat.json
    python -m benchmarks.repeat --quick --runs 100 --out repeat.json

A variant is a rule, a head width and a mask; it has two lengths. Processes first compile all
variants in parallel and compare outputs and gradients with float64. Then one process makes calls,
forward and backward, in random order without synchronisation. Each result must have the bits of
the first result of its shape, and the first must have those that were compared with float64.
`--quick` runs on a CPU. The exit status is 1 if a result differs or is wrong.
"""

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from reluformer import relu_attention, relu_attention_varlen
from reluformer.bench.timing import in_short
from reluformer.files import write_json
from reluformer.info import commit, info

RULES: dict[str, dict[str, Any]] = {
    "default": {"power": 4, "threshold": -4.0, "row_normalise": 1e-4},
    "one plus sum": {"power": 1, "threshold": -1.0, "row_normalise": 1.0},
    "square": {"power": 2, "threshold": -2.0, "row_normalise": 1e-4},
    "eighth power": {"power": 8, "threshold": -8.0, "row_normalise": 1e-4},
    "relu": {},
}
MASKS = ("full", "causal", "causal, lengths", "groups, lengths", "packed")
# Tiles divide the lengths of full calls only; the other calls have a tile past the end.
ALIGNED, ODD = (1024, 2048), (1111, 2055)
BATCH = 2
GRADIENTS = ("q", "k", "v", "threshold")
# Largest error relative to float64, by power: output, gradients of q, k and v. Gradients of
# thresholds are sums of cancelling terms.
LIMITS = {1: (3e-3, 6e-3), 2: (3e-3, 6e-3), 4: (5e-3, 1e-2), 8: (5e-3, 1e-2)}
THRESHOLD_LIMIT = 5e-2


class Variant(NamedTuple):
    """One set of compiled kernels."""

    rule: str
    width: int
    mask: str


class Plan(NamedTuple):
    """Where and how large calls are."""

    device: str
    dtype: torch.dtype
    heads: int
    shorten: int
    """Factor by which lengths are divided."""
    processes: int


# Each process needs up to 7 GiB for the reference in float64.
GPU = Plan("cuda", torch.bfloat16, 8, 1, 15)
TOY = Plan("cpu", torch.float32, 4, 64, 1)


def variants() -> list[Variant]:
    """All variants in order of importance; windows run on the portable kernels."""
    dense = [Variant(rule, width, mask) for mask, rule, width in product(MASKS, RULES, (64, 128))]
    return [*dense, *(Variant("default", width, "window") for width in (64, 128))]


def lengths_of(variant: Variant, plan: Plan) -> list[int]:
    """The lengths of a variant."""
    lengths = ALIGNED if variant.mask == "full" else ODD
    return [length // plan.shorten for length in lengths]


Results = list[Tensor]
"""Output and gradients of q, k, v and, if there are any, thresholds."""


def call(
    variant: Variant, length: int, plan: Plan, *, exact: bool = False
) -> Callable[[], Results]:
    """A call, forward and backward; an exact one is the reference in float64 on the same data."""
    source = torch.Generator(plan.device).manual_seed(length + 7 * variant.width)
    keys = plan.heads // 4 if "groups" in variant.mask else plan.heads
    sizes = [(heads, variant.width) for heads in (plan.heads, keys, keys, plan.heads)]
    tensors = [
        torch.randn(BATCH, length, *size, device=plan.device, generator=source).to(plan.dtype)
        for size in sizes
    ]
    options = dict(RULES[variant.rule])
    wide = torch.float64 if exact else torch.float32
    if "threshold" in options:
        spread = torch.linspace(1.0, 0.25, plan.heads, device=plan.device)
        options["threshold"] = (options["threshold"] * spread).to(wide).requires_grad_()
    if exact:
        tensors = [tensor.double() for tensor in tensors]
        options["impl"] = "reference"
    elif plan.device == "cuda":
        options["impl"] = "triton"
    if variant.mask == "packed":
        q, k, v, grad = (tensor.flatten(0, 1) for tensor in tensors)
        # Ragged sequences, one of them empty; the last rows belong to none.
        last = BATCH * length - 5
        ends = torch.tensor([0, length, length, length + length // 3, last], device=plan.device)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        arguments = (*leaves, ends, ends, length, length)
    else:
        q, k, v, grad = (tensor.transpose(1, 2) for tensor in tensors)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        arguments = tuple(leaves)
    options |= _visibility(variant.mask, length, plan)
    leaves += [options["threshold"]] if "threshold" in options else []

    def run() -> Results:
        attend: Any = relu_attention_varlen if variant.mask == "packed" else relu_attention
        output = attend(*arguments, **options)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]

    return run


def _visibility(mask: str, length: int, plan: Plan) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": mask in ("causal", "causal, lengths", "packed", "window")}
    if "lengths" in mask:
        options["key_lengths"] = torch.tensor([length - 3, length // 3], device=plan.device)
    return {**options, "window": length // 4} if mask == "window" else options


def digest(results: Results) -> list[int]:
    """A checksum of the bits of each result: the sum of all elements times their positions."""
    sums = []
    for tensor in results:
        bits = _bits(tensor).long().flatten()
        sums.append(int((bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum()))
    return sums


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def launched_kernels(function: Callable[[], Any]) -> list[str]:
    """Names of the kernels of this package that a function launches on a GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        function()
        torch.cuda.synchronize()
    names = {event.name for event in record.events()}
    return sorted(name for name in names if name.endswith("_kernel"))


def check(job: tuple[Variant, Plan]) -> list[dict[str, Any]]:
    """Compile a variant and compare it with float64: one row for each length."""
    variant, plan = job
    torch.set_num_threads(1)
    rows = []
    for length in lengths_of(variant, plan):
        row: dict[str, Any] = {**variant._asdict(), "length": length}
        try:
            function = call(variant, length, plan)
            results = function()
            exact = call(variant, length, plan, exact=True)()
            row["errors"] = _errors(results, exact)
            row["digest"] = digest(results)
            if plan.device == "cuda":
                row["kernels"] = launched_kernels(function)
                torch.cuda.empty_cache()
        except Exception as problem:
            row["failed"] = in_short(problem)
        rows.append(row)
    return rows


def _errors(results: Results, exact: Results) -> dict[str, float]:
    """Errors relative to the norm of the exact results."""
    names = ("output", *GRADIENTS)[: len(exact)]
    return {
        name: float((one.double() - other).norm() / other.norm().clamp_min(1e-6))
        for name, one, other in zip(names, results, exact, strict=True)
    }


def is_within(row: dict[str, Any]) -> bool:
    """Whether the errors of a row are within the limits of its rule."""
    forward, backward = LIMITS[RULES[row["rule"]].get("power", 1)]
    limits = {"output": forward, **dict.fromkeys("qkv", backward), "threshold": THRESHOLD_LIMIT}
    # A comparison with NaN is false.
    return all(error <= limits[name] for name, error in row["errors"].items())


def check_all(plan: Plan, jobs: list[Variant], seconds: float) -> list[dict[str, Any]]:
    """Rows of all variants that were checked within a time."""
    if plan.processes == 1:
        return [row for variant in jobs for row in check((variant, plan))]
    end, rows = time.monotonic() + seconds, []
    with multiprocessing.get_context("spawn").Pool(plan.processes) as pool:
        pending = pool.imap_unordered(check, [(variant, plan) for variant in jobs])
        for _ in jobs:
            try:
                rows += pending.next(max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
    return rows


def repeat(plan: Plan, rows: Iterable[dict[str, Any]], runs: int, seconds: float) -> int:
    """Make calls of mixed shapes, add to each row the counts of calls and of different results.

    Returns:
        The number of calls.
    """
    end, draw = time.monotonic() + seconds, random.Random(0)
    calls = []
    for row in rows:
        variant = Variant(row["rule"], row["width"], row["mask"])
        function = call(variant, row["length"], plan)
        first = function()
        row |= {"runs": 1, "is_checked": digest(first) == row["digest"]}
        differences = torch.zeros((), dtype=torch.int64, device=plan.device)
        calls.append((row, function, first, differences))
    done = len(calls)
    while calls and done < runs and time.monotonic() < end:
        row, function, first, differences = draw.choice(calls)
        equal = [
            (_bits(one) == _bits(other)).all() for one, other in zip(function(), first, strict=True)
        ]
        differences += ~torch.stack(equal).all()
        row["runs"] += 1
        done += 1
    for row, _, _, differences in calls:
        row["different"] = int(differences)
    return done


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Counts by rule and mask."""
    counts: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = {"rule": row["rule"], "mask": row["mask"]}
        empty = {**key, "shapes": 0, "runs": 0, "different": 0, "wrong": 0}
        count = counts.setdefault((row["rule"], row["mask"]), empty)
        count["shapes"] += 1
        count["runs"] += row.get("runs", 0)
        count["different"] += row.get("different", 0)
        count["wrong"] += not row["is_right"]
    return list(counts.values())


def main() -> None:
    """Check, repeat, write JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=12_000, help="number of calls")
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit")
    parser.add_argument("--quick", action="store_true", help="short calls on a CPU")
    options = parser.parse_args()
    begin = time.monotonic()
    plan, jobs = TOY if options.quick else GPU, variants()
    # Two thirds of the time are for compilation.
    rows = check_all(plan, jobs, options.seconds * 2 / 3)
    print(f"{time.monotonic() - begin:5.0f} s: compared with float64: {len(rows)} shapes")
    left = options.seconds - (time.monotonic() - begin)
    done = repeat(plan, [row for row in rows if "digest" in row], options.runs, left)
    for row in rows:
        row["is_right"] = "digest" in row and row["is_checked"] and is_within(row)
    counts = summary(rows)
    missing = 2 * len(jobs) - len(rows)
    report: dict[str, Any] = {
        "commit": commit(),
        "machine": info(),
        "seconds": time.monotonic() - begin,
    }
    report |= {"runs": done, "shapes_without_time": missing, "variants": counts, "shapes": rows}
    write_json(options.out, report)
    print(f"{'rule':14}{'mask':17}" + "".join(f"{name:>10}" for name in list(counts[0])[2:]))
    for count in counts:
        rule, mask, *numbers = count.values()
        print(f"{rule:14}{mask:17}" + "".join(f"{number:10}" for number in numbers))
    for row in rows:
        if not row["is_right"]:
            print(json.dumps(row))
    different = sum(count["different"] for count in counts)
    print(f"{done} runs, {different} different, {missing} shapes without time")
    if different or not all(row["is_right"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
