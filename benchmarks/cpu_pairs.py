"""Speed of impl="cpu" against SDPA's softmax in CPU seconds, for machines that run other work.

    python -m benchmarks.cpu_pairs --out pairs.json
    python -m benchmarks.cpu_pairs --dtype float32 --lengths 1024 --rounds 3
    python -m benchmarks.cpu_pairs --short --out short.json

All are timed in turn on one thread. Time is the CPU time of the process, so that waiting for a
core does not count. A round takes the smallest of a few calls, and a ratio is the median over
the rounds. Each call is timed with MKL and with oneDNN, torch's libraries for float32 products, and
the faster one counts: on AMD processors that is oneDNN for long rows and MKL for short ones.
`--short` takes the shapes of sentences and of a few rows instead of `--lengths`, and times
impl="reference" as well. `reluformer bench` measures elapsed time with several threads on a quiet
machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reluformer import relu_attention
from reluformer.bench.report import commit
from reluformer.info import info
from reluformer.model.config import AttentionConfig
from reluformer.ops.backends.cpu.native import library
from reluformer.products import fast_products

HEADS, WIDTH = 8, 64


class Shape(NamedTuple):
    """Sizes of a call."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    causal: bool = False


SHORT = (
    Shape(64, 4, 20, 20, 128),
    Shape(64, 4, 20, 20, 128, causal=True),
    Shape(32, 4, 64, 64, 64),
    Shape(16, 4, 1, 30, 128),
    Shape(1, 8, 1, 1000, 64),
    Shape(1, 8, 1, 20, 64),
)

# Calls of a round take at least this many CPU seconds, and there are at least two of them.
ROUND_SECONDS = 0.1


def options(rule: str, heads: int) -> dict[str, Any]:
    """Arguments of the call by the name of its rule."""
    if rule == "plain":
        return {}
    return {**AttentionConfig().fixed_options, "threshold": torch.full((heads,), -1.0)}


def calls(
    rule: str, dtype: torch.dtype, shape: Shape, mode: str, has_reference: bool
) -> dict[str, Callable[[], Any]]:
    """The contestants: calls that compute the output, or also all gradients."""
    trains, causal = mode == "both", shape.causal
    q, k, v, grad = (
        torch.randn(shape.batch, shape.heads, length, shape.width).to(dtype)
        for length in (shape.queries, shape.keys, shape.keys, shape.queries)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_(trains)
    chosen = options(rule, shape.heads)

    def ours() -> Tensor:
        return relu_attention(q, k, v, causal=causal, impl="cpu", **chosen)

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    def reference() -> Tensor:
        return relu_attention(q, k, v, causal=causal, impl="reference", **chosen)

    def with_gradients(call: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(), (q, k, v), grad)

    contestants = {"ours": ours, "sdpa": sdpa}
    if has_reference:
        contestants["reference"] = reference
    if trains:
        return {name: with_gradients(call) for name, call in contestants.items()}
    return dict(contestants)


def fastest(call: Callable[[], Any]) -> float:
    """CPU seconds of one call: the smallest of a round, with either library of torch."""
    with fast_products("cpu"):
        onednn = smallest(call)
    return min(onednn, smallest(call))


def smallest(call: Callable[[], Any]) -> float:
    """CPU seconds of one call: the smallest of a few."""
    times: list[float] = []
    while len(times) < 2 or sum(times) < ROUND_SECONDS:
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def measure(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, the smallest of all rounds, and our median speed relative to others."""
    for call in contestants.values():
        call()
    times = [{name: fastest(call) for name, call in contestants.items()} for _ in range(rounds)]
    results = {f"{name}_ms": round(1e3 * min(t[name] for t in times), 4) for name in contestants}
    for name in list(contestants)[1:]:
        ratio = "ratio" if name == "sdpa" else f"{name}_ratio"
        results[ratio] = round(statistics.median(t[name] / t["ours"] for t in times), 3)
    return results


def main() -> None:
    """Print one line for each shape, and write all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--short", action="store_true", help="Short rows, and the reference.")
    parser.add_argument("--mode", choices=["forward", "both"], action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write, updated after every shape.")
    arguments = parser.parse_args()
    if not library.available():
        raise SystemExit("build the kernels first: python -m reluformer.ops.backends.cpu.native")
    torch.set_num_threads(1)
    long = [
        Shape(1, HEADS, n, n, WIDTH, is_causal)
        for n in arguments.lengths
        for is_causal in (False, True)
    ]
    shapes = SHORT if arguments.short else long
    rows: list[dict[str, Any]] = []
    for dtype in arguments.dtype or ["float32", "bfloat16"]:
        for rule in ("plain", "default of the models"):
            for mode in arguments.mode or ["forward", "both"]:
                for shape in shapes:
                    kind = getattr(torch, dtype)
                    contestants = calls(rule, kind, shape, mode, arguments.short)
                    with torch.set_grad_enabled(mode == "both"):
                        row = measure(contestants, arguments.rounds)
                    setting = {"dtype": dtype, "rule": rule, "mode": mode, "n": shape.keys}
                    rows.append({**setting, **shape._asdict(), **row})
                    print(*rows[-1].values(), flush=True)
                    if arguments.out is not None:
                        date = datetime.now(UTC).isoformat(timespec="seconds")
                        document = {"date": date, "commit": commit(), "environment": info(),
                                    "rows": rows}  # fmt: skip
                        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
