"""Times choices among the Hopper kernels beside each other and cuDNN's softmax.

    python -m benchmarks.kernel_choices --out choices.json
    python -m benchmarks.kernel_choices --passes forward --out choices.json
    python -m benchmarks.kernel_choices --quick --out choices.json

A choice is an override of `triton/tuning.py`: the tile of the forward kernel, whether and where the
backward kernels store score gradients, their tiles, and whether one kernel computes all gradients
(of short sequences: `--lengths 32 64 128`). Calls go through the public function, forward, and
forward and backward. The choices and softmax run in interleaved rounds, and
ratios are medians over the rounds. `apart` is the largest difference of a result from that of the
first choice, relative to its norm. Processes compile all kernels first. `--quick` runs on a CPU,
where all choices are the same.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reluformer import relu_attention
from reluformer.bench.timing import Clock, in_short, ratio
from reluformer.files import write_json
from reluformer.info import commit, info
from reluformer.ops.backends.triton import tuning

SOFTMAX = "cuDNN"
CHOICES: dict[str, dict[str, Any]] = {
    "two, recomputed": {"forward_tile": "two", "gradient_bytes": 0},
    "late, recomputed": {"forward_tile": "late", "gradient_bytes": 0},
    "three, recomputed": {"forward_tile": "three", "gradient_bytes": 0},
    "two, stored": {"forward_tile": "two", "gradient_bytes": 512 << 20},
    "late, stored": {"forward_tile": "late", "gradient_bytes": 512 << 20},
    "late, 1 GiB": {"forward_tile": "late", "gradient_bytes": 1 << 30},
    "late, 2 GiB": {"forward_tile": "late", "gradient_bytes": 2 << 30},
    "late, compact": {
        "forward_tile": "late",
        "gradient_bytes": 528 << 20,
        "compact_gradients": True,
    },
    "late, compact, 128 rows": {
        "forward_tile": "late",
        "gradient_bytes": 528 << 20,
        "compact_gradients": True,
        "product_rows": 128,
    },
    "late, compact, 1 GiB, 128 rows": {
        "forward_tile": "late",
        "gradient_bytes": 1056 << 20,
        "compact_gradients": True,
        "product_rows": 128,
    },
    "late, stored, 64 rows": {
        "forward_tile": "late",
        "gradient_bytes": 512 << 20,
        "product_rows": 64,
    },
    "late, wide dQ": {"forward_tile": "late", "gradient_bytes": 0, "dq_tile": "wide"},
    "late, dQ of three": {"forward_tile": "late", "gradient_bytes": 0, "dq_tile": "three"},
    "late, wide dK/dV": {"forward_tile": "late", "gradient_bytes": 0, "dkv_tile": "wide"},
    "one pass": {"one_pass": True},
}
RULES: dict[str, dict[str, Any]] = {
    "power 4": {"power": 4, "threshold": -4.0, "row_normalise": 1e-4},
    "power 2": {"power": 2, "threshold": -2.0, "row_normalise": 1e-4},
    "power 4, 70 % zeros": {"power": 4, "threshold": 0.5, "row_normalise": 1e-4},
    "power 8": {"power": 8, "threshold": -8.0, "row_normalise": 1e-4},
    "1 + sum": {"power": 1, "threshold": -1.0, "row_normalise": 1.0},
    "plain": {},
}
TOKENS, FEATURES = 16_384, 2048
PASSES = ("forward", "both")
Row = dict[str, Any]


class Case(NamedTuple):
    """One shape with one rule."""

    rule: str
    width: int
    causal: bool
    length: int


def calls_of(case: Case, choices: Sequence[str], device: str) -> dict[str, Callable[[bool], Any]]:
    """A function for each choice and softmax; its argument says whether the backward runs."""
    shape = (TOKENS // case.length, FEATURES // case.width, case.length, case.width)
    if device == "cpu":
        shape = (1, 2, case.length, case.width)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
        for _ in range(4)
    )
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    options = dict(RULES[case.rule])
    if "threshold" in options:
        options["threshold"] = torch.full((shape[1],), options["threshold"], device=device)

    def run(attend: Callable[[], Tensor], backward: bool) -> list[Tensor]:
        output = attend()
        return [output, *torch.autograd.grad(output, leaves, grad)] if backward else [output]

    def ours(choice: str) -> Callable[[bool], Any]:
        def call(backward: bool) -> list[Tensor]:
            with tuning.override(**CHOICES[choice]):
                return run(lambda: relu_attention(*leaves, causal=case.causal, **options), backward)

        return call

    def softmax(backward: bool) -> list[Tensor]:
        kernels = [SDPBackend.CUDNN_ATTENTION] if device == "cuda" else [SDPBackend.MATH]
        with sdpa_kernel(kernels):
            return run(
                lambda: scaled_dot_product_attention(*leaves, is_causal=case.causal), backward
            )

    return {**{choice: ours(choice) for choice in choices}, SOFTMAX: softmax}


def compile_all(job: tuple[Case, str]) -> str | None:
    """Run a call once, which leaves its kernels in the cache on disk; its error, if it fails."""
    case, choice = job
    try:
        calls_of(case, [choice], "cuda")[choice](True)
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{case}, {choice}: {in_short(problem)}"
    return None


def measure(
    case: Case, choices: Sequence[str], passes: Sequence[str], rounds: int, device: str
) -> list[Row]:
    """Rows of all choices for each pass: forward, or forward and backward."""
    calls = calls_of(case, choices, device)
    first = calls[choices[0]](True)
    apart = {choice: difference(calls[choice](True), first) for choice in choices}
    rows: list[Row] = []
    for each in passes:
        clock = Clock(device)
        chosen = {name: partial(call, each == "both") for name, call in calls.items()}
        times = clock.rounds(chosen, rounds, 0.0)
        head = {**case._asdict(), "pass": each}
        softmax = statistics.median(times[SOFTMAX])
        rows.append({**head, "choice": SOFTMAX, "ms": softmax})
        for choice in choices:
            row = {**head, "choice": choice, "ms": statistics.median(times[choice])}
            row["x_softmax"] = ratio(times[choice], times[SOFTMAX])
            row["x_first"] = ratio(times[choice], times[choices[0]])
            rows.append({**row, "apart": apart[choice]})
    return rows


@torch.no_grad()
def difference(results: list[Tensor], others: list[Tensor]) -> float:
    """Largest difference of a tensor from another, relative to the norm of the other."""
    return max(
        float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-6))
        for one, other in zip(results, others, strict=True)
    )


def table(rows: list[Row]) -> str:
    """A line for each choice of each case."""
    titles = f"{'x softmax':>11}{'x first':>9}{'apart':>10}"
    lines = [f"{'case':44}{'pass':9}{'choice':20}{'ms':>9}{titles}"]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['case']}: {row['failed']}")
        elif row["choice"] != SOFTMAX:
            mask = "causal" if row["causal"] else "full"
            case = f"{row['rule']}, d {row['width']} {mask}, n {row['length']}"
            lines.append(
                f"{case:44}{row['pass']:9}{row['choice']:20}{row['ms']:9.3f}"
                f"{row['x_softmax']:11.3f}{row['x_first']:9.3f}{row['apart']:10.1e}"
            )
    return "\n".join(lines)


def main() -> None:
    """Compile, measure, write JSON and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 1024, 16384])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compile-only", action="store_true", help="fill the caches and stop")
    parser.add_argument("--compiled", action="store_true", help="the caches are filled")
    parser.add_argument("--quick", action="store_true", help="short calls on a CPU")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    lengths = [64] if options.quick else options.lengths
    cases = [
        Case(rule, width, causal, length)
        for length, rule, width, causal in product(
            lengths, options.rules, options.widths, (False, True)
        )
    ]
    begin = time.monotonic()
    failed: list[str] = []
    if device == "cuda" and not options.compiled:
        jobs = [(case, choice) for case in cases for choice in options.choices]
        with multiprocessing.get_context("spawn").Pool(12, maxtasksperchild=24) as pool:
            failed = [error for error in pool.imap_unordered(compile_all, jobs) if error]
        print(f"compiled in {time.monotonic() - begin:.0f} s", *failed, sep="\n", flush=True)
    if options.compile_only:
        return
    rows: list[Row] = []
    report = {"commit": commit(), "machine": info(), "choices": CHOICES, "rules": RULES}
    report |= {"not_compiled": failed, "rows": rows}
    for case in cases:
        try:
            rows += measure(case, options.choices, options.passes, options.rounds, device)
        except Exception as problem:
            rows.append({"case": str(case), "failed": in_short(problem)})
        write_json(options.out, report)
    print(table(rows))


if __name__ == "__main__":
    main()
