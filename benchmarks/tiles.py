"""Times candidate tiles of every kernel, for the table in `ops/backends/triton/tuning.py`.

    python -m benchmarks.tiles --out tiles.json             # all cases, a few minutes
    python -m benchmarks.tiles --only sentence 1024        # cases whose name contains one
    python -m benchmarks.tiles --only model                # the call of the default models

Each case is a call of a model. Long cases have 16,384 tokens of width 2048, sentence cases width
512 with learned gamma and threshold, and cases of the default model 32,768 tokens of width 512,
power 4, row normalisation and a gradient of the row sums. Worker processes compile all candidates
first. The time of a candidate is the median over replays of a CUDA graph of several calls, which
excludes the host. The tests check every tile of the table against float64.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from reluformer.files import write_json
from reluformer.ops.backends.triton import run_backward, run_forward, tuning
from reluformer.ops.backends.triton.backward_choice import Choice
from reluformer.ops.backends.triton.backward_launches import Results, prepare
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings
from reluformer.ops.backends.triton.tuning import Kernel, Tile

CALLS, REPLAYS = 4, 7
KERNELS: tuple[Kernel, ...] = ("forward", "dkv", "dq")
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Case:
    """One kind of call."""

    width: int
    mask: str
    length: int
    kind: Literal["long", "sentence", "model"] = "long"

    def __str__(self) -> str:
        return f"{self.width} {self.mask} {self.length}" + f" {self.kind}" * self.is_learned

    @property
    def is_learned(self) -> bool:
        """Whether gamma and threshold are learned."""
        return self.kind != "long"

    def problem(self, tokens: int | None = None, device: str = "cuda") -> Problem:
        """Random tensors [B, H, T, D], as views of [B, T, H, D] like those of models."""
        model = self.kind == "model"
        batch = (tokens or (32_768 if model else 16_384)) // self.length
        heads = (512 if self.is_learned else 2048) // self.width
        qkv = torch.randn(3, batch, self.length, heads, self.width, device=device)
        q, k, v = qkv.bfloat16().transpose(2, 3)
        gamma = torch.rand(heads, device=device) + 0.5 if self.is_learned else None
        # Thresholds of fourth powers start at -4.
        threshold = -1 - 3 * torch.rand(heads, device=device) if model else gamma
        lengths = None
        if self.mask == "lengths":
            lengths = torch.randint(self.length * 3 // 4, self.length + 1, (batch,), device=device)
        optional = NO_INPUTS._replace(gamma=gamma, threshold=threshold, key_lengths=lengths)
        settings = Settings(
            self.width**-0.5,
            max_q=self.length,
            max_k=self.length,
            length_exponent=1.0 if model else 0.5,
            power=4 if model else 1,
            causal=self.mask == "causal",
            row_normalise=1e-4 if model else 0.0,
        )
        return Problem(q, k, v, optional, settings)


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
# These tiles do not spill registers in the call of the default models. A multiprocessor holds two
# to six programs, whose matrix products and elementwise work can overlap.
SHARING: dict[Kernel, list[Shape]] = {
    "forward": [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 2), (128, 64, 4, 3),
        (64, 128, 4, 2), (64, 128, 4, 3), (128, 32, 4, 3), (64, 32, 4, 3), (128, 64, 8, 2),
        (128, 64, 8, 3), (64, 64, 8, 3),
    ],
    "dkv": [
        (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 64, 4, 3), (32, 64, 4, 2),
        (32, 64, 4, 3), (64, 64, 8, 3),
    ],
    "dq": [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3),
        (128, 32, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 8, 3),
    ],
}  # fmt: skip
# A multiprocessor holds one program of these tiles.
ALONE: dict[Kernel, list[Shape]] = {
    "forward": [(128, 128, 8, 2), (128, 128, 8, 3), (256, 64, 8, 3)],
    "dkv": [(64, 128, 8, 2), (64, 128, 8, 3), (128, 64, 8, 3), (128, 128, 8, 2)],
    "dq": [(64, 128, 8, 2), (128, 128, 8, 2)],
}
SHORT: list[Shape] = [
    (32, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (32, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2)
]  # fmt: skip
CASES = SENTENCES + LONG + MODELS


def candidates(case: Case, kernel: Kernel) -> list[Tile]:
    """Tiles to time; the choice of the table comes first."""
    # Same rule as `plan.pick_tile`: the kernel of the key gradients masks lengths before its loop.
    is_masked = case.mask == "causal" or (case.mask == "lengths" and kernel != "dkv")
    default = tuning.pick(kernel, case.width, is_masked, case.length, 2)
    return list(dict.fromkeys([default, *_others(case, kernel)]))


def _others(case: Case, kernel: Kernel) -> list[Tile]:
    if case.kind == "model" and case.width == 128:
        return [Tile(*shape, one_loop=single) for shape in SHORT for single in (False, True)]
    if case.kind == "model":
        # Row-normalised calls always prescale.
        single = [Tile(*shape, one_loop=True) for shape in SHARING[kernel]]
        return [Tile(*shape) for shape in SHARING[kernel] + ALONE[kernel]] + single
    shapes = [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 8, 2)]
    if case.kind == "sentence":
        shapes += [(32, 32, 2, 1), (32, 32, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2), (64, 64, 4, 1)]
    else:
        shapes += [(64, 128, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 8, 3)]
        if kernel == "forward":
            shapes += [(256, 64, 8, 3), (128, 128, 8, 3), (128, 64, 8, 4), (64, 128, 4, 3)]
    tiles = [Tile(*shape) for shape in shapes]
    if case.mask != "full":
        tiles += [Tile(*shape, one_loop=True) for shape in shapes]
        if kernel == "dkv" and case.kind == "long":
            tiles += [Tile(*shape, prescale=True) for shape in shapes]
    return tiles


def work(problem: Problem, kernel: Kernel) -> Callable[[], object]:
    """A call of one kernel; for key gradients with the preceding pass over rows."""
    if kernel == "forward":
        return lambda: run_forward.forward(problem, int(problem.is_row_normalised))
    rows = None
    grads = run_backward.Gradients(torch.randn_like(problem.q))
    if problem.optional.gamma is not None:
        rows = torch.rand(problem.q.shape[:3], device=problem.q.device)
        grads = grads._replace(out=torch.randn_like(problem.q))
    if problem.is_row_normalised:
        grads = grads._replace(grad_sum=rows, row_sum=rows)
    row_dot, shift = (None, None) if rows is None else (rows.clone(), torch.empty_like(rows))
    empty = [torch.empty_like(tensor) for tensor in problem[:3]]
    results = Results(empty[0], empty[1], empty[2], row_dot, shift)
    launches = prepare(problem, grads, results, Choice(False, 0))
    scratch = run_backward.new_scratch(launches, problem, grads, None)
    run = run_backward.run_dkv if kernel == "dkv" else run_backward.run_dq
    return lambda: run(launches, problem, grads, results, scratch)


def compile_one(job: tuple[Case, Kernel, Tile]) -> str | None:
    """Compile and run once; return the error message on failure."""
    case, kernel, tile = job
    try:
        with tuning.override({kernel: tile}):
            work(case.problem(), kernel)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
    return None


def microseconds(call: Callable[[], object]) -> float:
    """Median device time of one call."""
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


def times(problem: Problem, kernel: Kernel, tiles: Iterable[Tile]) -> dict[Tile, float]:
    """Microseconds of a call with each tile."""
    taken = {}
    for tile in tiles:
        # The launches of a backward pass are prepared with the tile.
        with tuning.override({kernel: tile}):
            taken[tile] = microseconds(work(problem, kernel))
    return taken


def jobs(cases: list[Case]) -> Iterator[tuple[Case, Kernel, Tile]]:
    """All combinations to time."""
    for case in cases:
        for kernel in KERNELS:
            for tile in candidates(case, kernel):
                yield case, kernel, tile


def main() -> None:
    """Compile and time all tiles; print the best of each case beside the table's choice."""
    parser = argparse.ArgumentParser(description="Times tiles of the attention kernels.")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="time after which no case starts"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    cases = [case for case in CASES if any(p in str(case) for p in arguments.only)]
    # Cases that differ in length share a compilation.
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
            kind = (case.width, case.mask, case.kind, kernel)
            tiles = [tile for tile in candidates(case, kernel) if failed[*kind, tile] is None]
            taken = times(problem, kernel, tiles)
            default = taken[candidates(case, kernel)[0]]
            best = sorted(taken, key=taken.__getitem__)[:3]
            shown = "  ".join(f"{taken[t]:.1f} {_short(t)}" for t in best)
            print(f"{case!s:24} {kernel:8} table {default:7.1f} us | {shown}", flush=True)
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
