"""Decoding with rectified attention against SDPA and a copy of the same bytes, on one GPU.

    python -m benchmarks.decode --out decode.json
    TRITON_INTERPRET=1 python -m benchmarks.decode --quick --out decode.json

Tiles whose error against float64 exceeds the tolerance are not timed. A first pass selects the
fastest tile on one shape, for each head width and variant; all shapes use it. Times are medians
of interleaved rounds, and ratios are medians of the ratios within a round. Calls rotate over
several copies of small inputs, so that inputs are not read from the cache. `of copy` is the time
of a device copy that reads and writes as many bytes as keys and values have, over our time; it
exceeds 1 where values are not read. SDPA runs each backend with grouped heads and with the heads
of a group as query rows; the faster one counts.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reluformer import PagedCache, decode_attention, relu_attention
from reluformer.bench.timing import Clock, ratio
from reluformer.ops.backends.triton import tuning
from reluformer.ops.backends.triton.tuning import Tile

TOLERANCE = 3e-3
WAYS = ("whole", "skip", "paged")
"""Variants: read all values; skip values without weight; the same from pages."""


@dataclass(frozen=True)
class Data:
    """Kind of input: the share of keys, or of pages, without weight for a group of heads."""

    name: str
    dead: float | None
    """None for independent normal numbers."""
    by_page: bool = False


FULL, RANDOM = Data("all weights", 0.0), Data("random", None)
SPARSE, CLUSTERED = Data("80 % zero rows", 0.8), Data("80 % zero pages", 0.8, by_page=True)


@dataclass(frozen=True)
class Shape:
    """One row of the table."""

    batch: int
    heads: int
    kv_heads: int
    width: int
    keys: int
    queries: int = 1

    def __str__(self) -> str:
        text = f"B {self.batch}, {self.heads}/{self.kv_heads}, d {self.width}, n {self.keys}"
        return text if self.queries == 1 else f"{text}, q {self.queries}"


@dataclass(frozen=True)
class Plan:
    """Shapes and settings: the H200 run, or toy sizes that test this script on a CPU."""

    device: str
    dtype: torch.dtype
    shapes: tuple[Shape, ...]
    tuned_on: tuple[Shape, ...]
    """Shapes that select tiles, one for each head width and number of queries."""
    page: int
    checked: Shape
    """Shape of the comparison with float64, at every head width and number of queries."""
    rounds: int
    workers: int
    footprint: int
    """Minimum bytes of all copies of an input."""
    peers: tuple[tuple[str, str], ...]


GPU = Plan(
    "cuda",
    torch.bfloat16,
    (
        *(
            Shape(8, heads, kv_heads, width, keys)
            for keys in (32768, 8192)
            for width in (64, 128)
            for heads, kv_heads in ((16, 16), (32, 8), (16, 2))
        ),
        Shape(1, 64, 8, 128, 8192),
        Shape(1, 64, 8, 128, 32768),
        Shape(8, 64, 8, 128, 32768, queries=8),
    ),
    (
        Shape(8, 32, 8, 64, 32768),
        Shape(8, 32, 8, 128, 32768),
        Shape(8, 64, 8, 128, 32768, queries=8),
    ),
    64,
    Shape(2, 16, 2, 0, 3000),
    9,
    12,
    1 << 28,
    (("cudnn", "CUDNN_ATTENTION"), ("flash", "FLASH_ATTENTION"), ("math", "MATH")),
)
_SMALL = (Shape(1, 4, 2, 16, 64), Shape(1, 2, 2, 16, 48, queries=2))
TOY = Plan(
    "cpu", torch.float32, _SMALL, _SMALL, 16, Shape(1, 2, 1, 0, 40), 2, 0, 1, (("math", "MATH"),)
)


def candidates(way: str, width: int, quick: bool) -> list[Tile]:
    """Tiles to time. The number of splits of the keys is tried later, without compilation."""
    if quick:
        return [Tile(16, 16, 4, 1, skip=way != "whole")]
    wide = {
        "whole": [(64, 4, 3), (64, 4, 4), (64, 4, 2), (32, 4, 4), (128, 8, 3), (64, 8, 3),
                  (32, 2, 4)],
        "skip": [(64, 4, 3), (64, 4, 2), (64, 8, 3), (128, 8, 2), (128, 8, 3), (32, 4, 3),
                 (32, 2, 3)],
        # The page table is read in the same pipeline, which takes half of its stages.
        "paged": [(64, 4, 3), (64, 4, 5), (64, 8, 3), (32, 4, 5)],
    }  # fmt: skip
    # At half the width, twice the keys are the same number of bytes.
    factor = 2 if width <= 64 else 1
    tiles = [
        Tile(16, min(keys * factor, 256), warps, stages, skip=way != "whole")
        for keys, warps, stages in wide[way]
    ]
    return list(dict.fromkeys(tiles))


def inputs(plan: Plan, shape: Shape, data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v; keys without weight have negative scores for all queries, others positive."""

    def normal(heads: int, length: int) -> Tensor:
        tensor = torch.empty(
            shape.batch, heads, length, shape.width, device=plan.device, dtype=plan.dtype
        )
        return tensor.normal_()

    q = normal(shape.heads, shape.queries)
    k, v = normal(shape.kv_heads, shape.keys), normal(shape.kv_heads, shape.keys)
    if data.dead is not None:
        size = plan.page if data.by_page else 1
        units = math.ceil(shape.keys / size)
        sign = torch.rand(shape.batch, shape.kv_heads, units, 1, device=plan.device)
        sign = torch.where(sign < data.dead, -1, 1).to(plan.dtype)
        q.abs_()
        k.abs_().mul_(sign.repeat_interleave(size, dim=2)[:, :, : shape.keys])
    return q, k, v


def cached(plan: Plan, k: Tensor, v: Tensor) -> PagedCache:
    """The same keys and values in a paged cache."""
    batch, heads, keys, width = k.shape
    cache = PagedCache(
        batch, heads, width, pages=batch * math.ceil(keys / plan.page), page_size=plan.page,
        max_length=keys, dtype=k.dtype, device=k.device,
    )  # fmt: skip
    for start in range(0, keys, 4096):
        part = slice(start, start + 4096)
        cache.append(k[:, :, part], v[:, :, part])
    return cache


def prepare(plan: Plan, way: str, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """A call of one variant on one input."""
    if way in ("whole", "skip"):
        return lambda: relu_attention(q, k, v, impl="triton")
    cache = cached(plan, k, v)
    return lambda: decode_attention(q, cache, causal=False, impl="triton")


# Variant, head width and number of queries.
Case = tuple[str, int, int]
Allowed = dict[Case, list[Tile]]
Chosen = dict[Case, Tile]


def check_tile(job: tuple[Plan, str, int, int, Tile]) -> dict[str, Any]:
    """Compile one tile and compare it with float64; a worker does so to fill the compile cache."""
    plan, way, width, queries, tile = job
    entry = {"way": way, "width": width, "queries": queries, "tile": asdict(tile)}
    torch.manual_seed(0)
    shape = replace(plan.checked, width=width, queries=queries)
    try:
        worst = 0.0
        for data in (FULL, RANDOM, SPARSE, CLUSTERED):
            q, k, v = inputs(plan, shape, data)
            call = prepare(plan, way, q, k, v)
            with tuning.override({"decode": tile}):
                output = call().double()
            exact = relu_attention(q.double(), k.double(), v.double(), impl="reference")
            error = float((output - exact).norm() / exact.norm().clamp(min=1e-6))
            # This form keeps NaN, because comparisons with NaN are false.
            worst = error if not error <= worst else worst
    except Exception as problem:
        return {**entry, "ok": False, "error": f"{type(problem).__name__}: {problem}"[:300]}
    return {**entry, "ok": worst <= TOLERANCE, "error": worst}


def gate(plan: Plan) -> Allowed:
    """Tiles that agree with float64, for each variant, head width and number of queries."""
    jobs = [
        (plan, way, shape.width, shape.queries, tile)
        for shape in plan.tuned_on
        for way in WAYS
        for tile in candidates(way, shape.width, plan.device == "cpu")
    ]
    if plan.workers:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(plan.workers, mp_context=context) as pool:
            entries = list(pool.map(check_tile, jobs))
    else:
        entries = [check_tile(job) for job in jobs]
    allowed: Allowed = {}
    for entry in entries:
        if entry["ok"]:
            key = (entry["way"], entry["width"], entry["queries"])
            allowed.setdefault(key, []).append(Tile(**entry["tile"]))
        else:
            print("above the tolerance or failed:", json.dumps(entry), flush=True)
    print(f"{sum(map(len, allowed.values()))} of {len(jobs)} tiles passed", flush=True)
    return allowed


class Inputs:
    """Copies of one input that exceed the cache together; each call uses the next one."""

    def __init__(self, plan: Plan, shape: Shape, data: Data) -> None:
        size = 2 * shape.batch * shape.kv_heads * shape.keys * shape.width * plan.dtype.itemsize
        self.bytes, self.plan, self.shape = size, plan, shape
        copies = max(1, math.ceil(plan.footprint / size))
        self.sets = [inputs(plan, shape, data) for _ in range(copies)]
        self.copies = cycle([(torch.empty_like(k), k) for _, k, _ in self.sets])

    def ours(self, way: str) -> Callable[[Tile], None]:
        """A variant as a function of the tile."""
        turn = cycle([prepare(self.plan, way, *qkv) for qkv in self.sets])

        def call(tile: Tile) -> None:
            with tuning.override({"decode": tile}):
                next(turn)()

        return call

    def peer(self, backend: str, packed: bool) -> Callable[[], Any]:
        """SDPA; with `packed`, the heads of a group are query rows of their key/value head."""
        turn = cycle(self.sets)
        grouped = self.shape.heads != self.shape.kv_heads

        def call() -> None:
            q, k, v = next(turn)
            if packed:
                q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            with sdpa_kernel(getattr(SDPBackend, backend)):
                scaled_dot_product_attention(q, k, v, enable_gqa=grouped and not packed)

        return call

    def peers(self) -> dict[str, Callable[[], Any]]:
        """SDPA backends that run this shape."""
        calls = {}
        for name, backend in self.plan.peers:
            # This backend stores all scores and repeats grouped keys for each head.
            if name == "math" and self.plan.device == "cuda" and self.bytes > 1 << 28:
                continue
            for packed in (False, True):
                if packed and self.shape.heads == self.shape.kv_heads:
                    continue
                call = self.peer(backend, packed)
                try:
                    call()
                except RuntimeError:
                    continue
                calls[name + " packed" * packed] = call
        return calls

    def copy(self) -> None:
        """Read and write as many bytes as keys and values have together."""
        target, source = next(self.copies)
        target.copy_(source)


def tune(plan: Plan, clock: Clock, allowed: Allowed) -> tuple[Chosen, list[dict[str, Any]]]:
    """The fastest allowed tile for each variant and shape, and all times, fastest first."""
    chosen: Chosen = {}
    report: list[dict[str, Any]] = []
    data = {"whole": FULL, "skip": SPARSE, "paged": FULL}
    for shape in plan.tuned_on:
        for way in WAYS:
            tiles = allowed.get((way, shape.width, shape.queries), [])
            if plan.device == "cuda":
                tiles = [replace(tile, programs=count) for tile in tiles for count in (2, 4, 8)]
            if not tiles:
                continue
            call = Inputs(plan, shape, data[way]).ours(way)
            times = clock.rounds({str(tile): partial(call, tile) for tile in tiles}, 3, 0.0)
            # The clock leaves out tiles that are far slower than the fastest.
            tiles = [tile for tile in tiles if str(tile) in times]
            medians = {tile: statistics.median(times[str(tile)]) for tile in tiles}
            ranked = sorted(tiles, key=medians.__getitem__)
            chosen[way, shape.width, shape.queries] = ranked[0]
            report += [
                {"way": way, "shape": str(shape), "tile": asdict(tile), "ms": medians[tile]}
                for tile in ranked
            ]
    return chosen, report


def measure(plan: Plan, shape: Shape, data: Data, clock: Clock, chosen: Chosen) -> dict[str, Any]:
    """One row: times, rates and ratios of all calls on one kind of data."""
    copies = Inputs(plan, shape, data)
    ways = WAYS[:2] if data in (RANDOM, SPARSE) else WAYS
    calls: dict[str, Callable[[], Any]] = {"copy": copies.copy, **copies.peers()}
    for way in ways:
        tile = chosen.get((way, shape.width, shape.queries))
        if tile is not None:
            calls[way] = partial(copies.ours(way), tile)
    times = clock.rounds(calls, plan.rounds, 0.0, yardstick="copy")
    peers = [name for name in times if name not in (*WAYS, "copy")]
    best = min(peers, key=lambda name: statistics.median(times[name]), default=None)
    row: dict[str, Any] = {
        "shape": str(shape), **asdict(shape), "data": data.name, "bytes": copies.bytes,
        "peer": best,
    }  # fmt: skip
    for name, rounds in times.items():
        row[name] = {
            "ms": statistics.median(rounds),
            "low": min(rounds),
            "high": max(rounds),
            "TB/s": copies.bytes / statistics.median(rounds) / 1e9,
            "of copy": ratio(rounds, times["copy"]),
            **({"x peer": ratio(rounds, times[best])} if best else {}),
            **({"host us": clock.host[name]} if name in clock.host else {}),
        }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a text table."""
    lines = [f"{'shape':28} {'data':16} {'way':13} {'ms':>8} {'host us':>8} {'TB/s':>6} "
             f"{'of copy':>8} {'x peer':>7}  peer"]  # fmt: skip
    for row in rows:
        for name in ("copy", row["peer"], *WAYS):
            if name in row:
                result = row[name]
                lines.append(
                    f"{row['shape']:28} {row['data']:16} {name:13} {result['ms']:8.4f} "
                    f"{result.get('host us', math.nan):8.0f} {result['TB/s']:6.2f} "
                    f"{result['of copy']:8.2f} {result.get('x peer', math.nan):7.2f}  {row['peer']}"
                )
    return "\n".join(lines)


def main() -> None:
    """Check, tune and measure; write JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="time after which no measurement starts"
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes on a CPU")
    arguments = parser.parse_args()
    start = time.monotonic()
    plan = TOY if arguments.quick else GPU
    clock = Clock(plan.device)
    allowed = gate(plan)
    checked = time.monotonic() - start
    chosen, tuning = tune(plan, clock, allowed)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "cudnn": torch.backends.cudnn.version(),
        "chosen": {
            f"{way}, width {width}, queries {queries}": asdict(tile)
            for (way, width, queries), tile in chosen.items()
        },
        "tuning": tuning,
    }
    for name, tile in report["chosen"].items():
        print(f"{name}:", json.dumps(tile), flush=True)
    print(f"checks took {checked:.0f} s, tuning {time.monotonic() - start - checked:.0f} s")
    rows = report["rows"] = []
    for shape in plan.shapes:
        long = shape.keys == plan.shapes[0].keys
        for data in (FULL, SPARSE, RANDOM, CLUSTERED) if long else (FULL, SPARSE):
            if time.monotonic() - start > arguments.seconds:
                print(f"no time left for {shape}, {data.name}", flush=True)
                continue
            try:
                rows.append(measure(plan, shape, data, clock, chosen))
            except Exception as problem:
                text = f"{type(problem).__name__}: {problem}"[:500]
                report.setdefault("failures", {})[f"{shape}, {data.name}"] = text
                print(f"FAILED {shape}, {data.name}: {text[:300]}", flush=True)
            report["seconds"] = time.monotonic() - start
            arguments.out.write_text(json.dumps(report, indent=1))
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
