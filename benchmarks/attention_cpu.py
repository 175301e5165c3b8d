"""Rectified attention on the CPU against SDPA and the eager reference, in interleaved rounds.

    python benchmarks/attention_cpu.py --threads 1 --out attention_cpu.json
    python benchmarks/attention_cpu.py --quick

Numbers are medians, over the rounds, of a contestant's time divided by ours within a round: above 1
we are faster. Every row is first compared with float64. 8 heads of width 64, batch 1; `tiny` has
the shapes of a sentence model, batch 32.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import reluformer

HEADS, WIDTH = 8, 64
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
Call = Callable[[], Any]


def inputs(batch: int, queries: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and an output gradient, views of [B, T, H, D] as a model makes them."""
    return [
        torch.randn(batch, length, HEADS, WIDTH).to(dtype).transpose(1, 2)
        for length in (queries, keys, keys, queries)
    ]


def error(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """Relative error against float64, over the last 64 queries."""
    q = q[:, :, -64:].detach()
    ours = reluformer.relu_attention(q, k.detach(), v.detach(), causal=causal, impl="cpu")
    wanted = reluformer.relu_attention(
        q.double(), k.detach().double(), v.detach().double(), causal=causal, impl="reference"
    )
    return float((ours.double() - wanted).norm() / wanted.norm())


def contestants(mode: str, causal: bool, given: list[Tensor], reference: bool) -> dict[str, Call]:
    """ours, SDPA and, unless its table of weights is too large, the reference."""
    q, k, v, grad = given
    aligned = causal and q.shape[2] == k.shape[2]

    def relu(impl: str) -> Tensor:
        return reluformer.relu_attention(q, k, v, causal=causal, impl=impl)

    makers: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: relu("cpu"),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=aligned),
    }
    if reference:
        makers["reference"] = lambda: relu("reference")
    if mode == "forward":
        return {name: _without_graph(make) for name, make in makers.items()}
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    outputs = {name: make() for name, make in makers.items()}
    return {
        name: (lambda out=out: torch.autograd.grad(out, leaves, grad, retain_graph=True))
        for name, out in outputs.items()
    }


def _without_graph(make: Callable[[], Tensor]) -> Call:
    def call() -> None:
        with torch.no_grad():
            make()

    return call


def rounds(calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Seconds per call in interleaved rounds, at least five."""
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, int(0.002 / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["ours"]) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return times


def shapes(quick: bool) -> list[tuple[str, int, int, int, bool]]:
    """(name, batch, queries, keys, causal)."""
    found = []
    for length in (64, 128) if quick else (1024, 2048, 4096, 8192):
        found += [("full", 1, length, length, False), ("causal", 1, length, length, True)]
        found += [("decode", 1, 1, length, True)]
    for length in (8,) if quick else (8, 32, 128, 512):
        found += [("tiny", 32, length, length, True), ("tiny decode", 32, 1, length, True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.5, help="time for one row")
    parser.add_argument("--quick", action="store_true", help="small shapes, a few rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    print(f"{'':34}{'ours ms':>9}{'x sdpa':>8}{'x reference':>13}")
    for dtype in (torch.float32, torch.bfloat16):
        for name, batch, queries, keys, causal in shapes(arguments.quick):
            given = inputs(batch, queries, keys, dtype)
            wrong = error(*given[:3], causal)
            assert wrong <= BOUNDS[dtype], f"{name} {keys} {dtype}: error {wrong:.1e}"
            for mode in ("forward", "backward") if queries > 1 else ("forward",):
                small = batch * queries * keys <= 1 << 22
                calls = contestants(mode, causal, given, reference=small)
                times = rounds(calls, 0.05 if arguments.quick else arguments.seconds)
                row = {"dtype": str(dtype), "shape": name, "keys": keys, "mode": mode,
                       "error": wrong, "ms": statistics.median(times["ours"]) * 1e3}  # fmt: skip
                for other in times.keys() - {"ours"}:
                    pairs = zip(times[other], times["ours"], strict=True)
                    row[f"x {other}"] = statistics.median(theirs / ours for theirs, ours in pairs)
                rows.append(row)
                label = f"{str(dtype)[6:]} {name} {keys} {mode}"
                print(f"{label:34}{row['ms']:9.3f}{row['x sdpa']:8.2f}"
                      f"{row.get('x reference', float('nan')):13.2f}", flush=True)  # fmt: skip
    if arguments.out is not None:
        report = {"torch": torch.__version__, "threads": arguments.threads, "rows": rows}
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
