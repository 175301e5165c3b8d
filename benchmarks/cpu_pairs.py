"""Speed of impl="cpu" against SDPA's softmax in CPU seconds, for machines that run other work.

    python -m benchmarks.cpu_pairs --out pairs.json
    python -m benchmarks.cpu_pairs --dtype float32 --lengths 1024 --rounds 3

Both are timed in turn on one thread. Time is the CPU time of the process, so that waiting for a
core does not count. A round takes the smallest of a few calls, and the ratio is the median over
the rounds. `reluformer bench` measures elapsed time with several threads on a quiet machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reluformer import relu_attention
from reluformer.bench.report import commit
from reluformer.info import info
from reluformer.model.config import AttentionConfig
from reluformer.ops.backends.cpu.native import library

HEADS, WIDTH = 8, 64
# Calls of a round take at least this many CPU seconds, and there are at least two of them.
ROUND_SECONDS = 0.1


def options(rule: str) -> dict[str, Any]:
    """Arguments of the call by the name of its rule."""
    if rule == "plain":
        return {}
    return {**AttentionConfig().fixed_options, "threshold": torch.full((HEADS,), -1.0)}


def calls(
    rule: str, dtype: torch.dtype, length: int, causal: bool, mode: str
) -> dict[str, Callable[[], Any]]:
    """The two contestants: calls that compute the output, or also all gradients."""
    trains = mode == "both"
    q, k, v, grad = (torch.randn(1, HEADS, length, WIDTH).to(dtype) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_(trains)
    chosen = options(rule)

    def ours() -> Tensor:
        return relu_attention(q, k, v, causal=causal, impl="cpu", **chosen)

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    def with_gradients(call: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(), (q, k, v), grad)

    contestants = {"ours": ours, "sdpa": sdpa}
    if trains:
        return {name: with_gradients(call) for name, call in contestants.items()}
    return dict(contestants)


def fastest(call: Callable[[], Any]) -> float:
    """CPU seconds of one call: the smallest of a round."""
    times: list[float] = []
    while len(times) < 2 or sum(times) < ROUND_SECONDS:
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def measure(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of both, the smallest of all rounds, and the median ratio of the rounds."""
    for call in contestants.values():
        call()
    times = [{name: fastest(call) for name, call in contestants.items()} for _ in range(rounds)]
    return {
        "ours_ms": round(1e3 * min(t["ours"] for t in times), 3),
        "sdpa_ms": round(1e3 * min(t["sdpa"] for t in times), 3),
        "ratio": round(statistics.median(t["sdpa"] / t["ours"] for t in times), 3),
    }


def main() -> None:
    """Print one line for each shape, and write all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--mode", choices=["forward", "both"], action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write, updated after every shape.")
    arguments = parser.parse_args()
    if not library.available():
        raise SystemExit("build the kernels first: python -m reluformer.ops.backends.cpu.native")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for dtype in arguments.dtype or ["float32", "bfloat16"]:
        for rule in ("plain", "default of the models"):
            for mode in arguments.mode or ["forward", "both"]:
                for n in arguments.lengths:
                    for causal in (False, True):
                        contestants = calls(rule, getattr(torch, dtype), n, causal, mode)
                        with torch.set_grad_enabled(mode == "both"):
                            row = measure(contestants, arguments.rounds)
                        shape = {"dtype": dtype, "rule": rule, "mode": mode, "n": n}
                        rows.append({**shape, "causal": causal, **row})
                        print(*rows[-1].values(), flush=True)
                        if arguments.out is not None:
                            date = datetime.now(UTC).isoformat(timespec="seconds")
                            document = {"date": date, "commit": commit(), "environment": info(),
                                        "heads": HEADS, "width": WIDTH, "rows": rows}  # fmt: skip
                            arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
