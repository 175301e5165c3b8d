"""Which tile serves which call: times candidates for every kernel, for `ops/triton/tuning.py`.

    python benchmarks/tuning.py --out tuning.json            # all cases, a few minutes
    python benchmarks/tuning.py --only sentence 1024        # cases whose name contains one
    python benchmarks/tuning.py --only model                # the call of the default models

Each case is a call as models make it: 16,384 tokens, width 2048 or, for sentences, 512 with learned
gamma and threshold; the default models', 32,768 tokens, width 512, fourth powers divided by their
sums, whose gradients arrive too. Worker processes compile all candidates first. A candidate's time
is the median over replays of a CUDA graph of some calls, so that the host does not count. The tests
check every tile of the table against float64.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reluformer.files import write_json
from reluformer.ops.backends.triton import run_backward, run_forward, tuning
from reluformer.ops.backends.triton.plan import Problem
from reluformer.ops.backends.triton.tuning import Kernel, Tile

CALLS, REPLAYS = 4, 7
KERNELS: tuple[Kernel, ...] = ("forward", "keys", "queries")
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Case:
    """One kind of call; those of a sentence model and a default model learn gamma and threshold."""

    width: int
    mask: str
    length: int
    kind: Literal["long", "sentence", "model"] = "long"

    def __str__(self) -> str:
        return f"{self.width} {self.mask} {self.length}" + f" {self.kind}" * self.learned

    @property
    def learned(self) -> bool:
        """Whether gamma and threshold are."""
        return self.kind != "long"

    def problem(self, tokens: int | None = None, device: str = "cuda") -> Problem:
        """Random tensors in the layout of the models: views of [B, T, H, D]."""
        model = self.kind == "model"
        batch = (tokens or (32_768 if model else 16_384)) // self.length
        heads = (512 if self.learned else 2048) // self.width
        made = torch.randn(3, batch, self.length, heads, self.width, device=device)
        q, k, v = made.bfloat16().transpose(2, 3)
        gamma = torch.rand(heads, device=device) + 0.5 if self.learned else None
        # Thresholds of fourth powers start at -4.
        threshold = -1 - 3 * torch.rand(heads, device=device) if model else gamma
        lengths = None
        if self.mask == "lengths":
            lengths = torch.randint(self.length * 3 // 4, self.length + 1, (batch,), device=device)
        return Problem(
            q, k, v, gamma, threshold, lengths, None, None, None, None,
            scale=self.width**-0.5, gamma_value=1.0, threshold_value=0.0,
            length_exponent=1.0 if model else 0.5, power=4 if model else 1,
            causal=self.mask == "causal", window=0, dropout_p=0.0,
            max_q=self.length, max_k=self.length, row_normalise=1e-4 if model else 0.0,
        )  # fmt: skip


SENTENCES = [
    Case(width, mask, length, "sentence")
    for width in (64, 128)
    for mask in ("lengths", "causal")
    for length in (24, 32, 48, 64, 88, 128, 256)
]
LONG = [
    Case(width, mask, length)
    for width in (64, 128)
    for mask in ("full", "lengths", "causal")
    for length in (512, 1024, 2048, 4096)
]
# The widths of the heads of the recipes `document` and `sentence`.
MODELS = [
    Case(width, mask, length, "model")
    for width, lengths in ((64, (128, 256, 512, 1024, 2048)), (128, (32, 48, 64, 96, 128)))
    for mask in ("lengths", "causal")
    for length in lengths
]
# None of these makes the default models' kernels spill, and a multiprocessor holds two to six of
# their programs, so that products of one may overlap with the elementwise work of another.
SHARING: dict[Kernel, list[Shape]] = {
    "forward": [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 2), (128, 64, 4, 3),
        (64, 128, 4, 2), (64, 128, 4, 3), (128, 32, 4, 3), (64, 32, 4, 3), (128, 64, 8, 2),
        (128, 64, 8, 3), (64, 64, 8, 3),
    ],
    "keys": [
        (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 64, 4, 3), (32, 64, 4, 2),
        (32, 64, 4, 3), (64, 64, 8, 3),
    ],
    "queries": [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3),
        (128, 32, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 8, 3),
    ],
}  # fmt: skip
# Of these it holds one.
ALONE: dict[Kernel, list[Shape]] = {
    "forward": [(128, 128, 8, 2), (128, 128, 8, 3), (256, 64, 8, 3)],
    "keys": [(64, 128, 8, 2), (64, 128, 8, 3), (128, 64, 8, 3), (128, 128, 8, 2)],
    "queries": [(64, 128, 8, 2), (128, 128, 8, 2)],
}
SHORT: list[Shape] = [
    (32, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (32, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2)
]  # fmt: skip
CASES = SENTENCES + LONG + MODELS


def candidates(case: Case, kernel: Kernel) -> list[Tile]:
    """What is tried; the table's own choice comes first."""
    # As `Problem.tile` asks: a tile of keys meets their lengths once, before its loop.
    edged = case.mask == "causal" or (case.mask == "lengths" and kernel != "keys")
    own = tuning.pick(kernel, case.width, edged, case.length, 2)
    return list(dict.fromkeys([own, *_others(case, kernel)]))


def _others(case: Case, kernel: Kernel) -> list[Tile]:
    if case.kind == "model" and case.width == 128:
        return [Tile(*shape, one_loop=single) for shape in SHORT for single in (False, True)]
    if case.kind == "model":
        # Those who divide prescale anyway.
        single = [Tile(*shape, one_loop=True) for shape in SHARING[kernel]]
        return [Tile(*shape) for shape in SHARING[kernel] + ALONE[kernel]] + single
    shapes = [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 8, 2)]
    if case.kind == "sentence":
        shapes += [(32, 32, 2, 1), (32, 32, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2), (64, 64, 4, 1)]
    else:
        shapes += [(64, 128, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 8, 3)]
        if kernel == "forward":
            shapes += [(256, 64, 8, 3), (128, 128, 8, 3), (128, 64, 8, 4), (64, 128, 4, 3)]
    found = [Tile(*shape) for shape in shapes]
    if case.mask != "full":
        found += [Tile(*shape, one_loop=True) for shape in shapes]
        if kernel == "keys" and case.kind == "long":
            found += [Tile(*shape, prescale=True) for shape in shapes]
    return found


def work(problem: Problem, kernel: Kernel) -> Callable[[], object]:
    """One call of the kernel alone, with the pass over rows that comes before the keys'."""
    if kernel == "forward":
        return lambda: run_forward.forward(problem, int(problem.divided))
    learned = problem.gamma is not None
    out = torch.randn_like(problem.q) if learned else None
    rows = torch.rand(problem.q.shape[:3], device=problem.q.device) if learned else None
    grads = run_backward.Gradients(out, None, torch.randn_like(problem.q), None, None)
    if problem.divided:
        grads = grads._replace(grad_sum=rows, row_sum=rows)
    row_dot, shift = (None, None) if rows is None else (rows.clone(), torch.empty_like(rows))
    first, second = torch.empty_like(problem.k), torch.empty_like(problem.v)
    if kernel == "keys":
        dots = row_dot if problem.divided else None
        return lambda: run_backward.key_gradients(problem, grads, (), first, second, dots, None)
    return lambda: run_backward.query_gradients(problem, grads, (), first, row_dot, shift, None)


def compile_one(job: tuple[Case, Kernel, Tile]) -> str | None:
    """Compile and run once; the reason if that fails."""
    case, kernel, tile = job
    try:
        with tuning.override({kernel: tile}):
            work(case.problem(), kernel)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
    return None


def microseconds(call: Callable[[], object]) -> float:
    """Of one call on the device."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def jobs(cases: list[Case]) -> Iterator[tuple[Case, Kernel, Tile]]:
    """Everything to time."""
    for case in cases:
        for kernel in KERNELS:
            for tile in candidates(case, kernel):
                yield case, kernel, tile


def main() -> None:
    """Compile, time, print the best of each case beside the table's choice."""
    parser = argparse.ArgumentParser(description="Times tiles of the attention kernels.")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=200.0, help="stop timing after so long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    cases = [case for case in CASES if any(p in str(case) for p in arguments.only)]
    # Lengths share their compilation: one of each kind is enough.
    kinds = {(c.width, c.mask, c.kind, k, t): (c, k, t) for c, k, t in jobs(cases)}
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        failed = dict(zip(kinds, pool.map(compile_one, kinds.values(), chunksize=4), strict=True))
    print(f"{len(kinds)} compiled in {time.monotonic() - start:.0f} s")
    rows: list[dict[str, Any]] = []
    for case in cases:
        problem = case.problem()
        for kernel in KERNELS:
            if time.monotonic() - start > arguments.seconds:
                break
            call, taken = work(problem, kernel), {}
            for tile in candidates(case, kernel):
                if failed[case.width, case.mask, case.kind, kernel, tile] is None:
                    with tuning.override({kernel: tile}):
                        taken[tile] = microseconds(call)
            own = taken[candidates(case, kernel)[0]]
            best = sorted(taken, key=taken.__getitem__)[:3]
            shown = "  ".join(f"{taken[t]:.1f} {_short(t)}" for t in best)
            print(f"{case!s:24} {kernel:8} table {own:7.1f} us | {shown}", flush=True)
            rows += [
                {"case": str(case), "kernel": kernel, **asdict(tile), "us": round(us, 2)}
                for tile, us in taken.items()
            ]
    if arguments.out:
        write_json(arguments.out, {"device": torch.cuda.get_device_name(), "rows": rows})
    broken = {reason for reason in failed.values() if reason}
    print(json.dumps(sorted(broken)[:5]))


def _short(tile: Tile) -> str:
    flags = "o" * tile.one_loop + "p" * tile.prescale
    return f"{tile.queries}x{tile.keys}/{tile.warps}/{tile.stages}{flags}"


if __name__ == "__main__":
    main()
