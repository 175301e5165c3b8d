"""Decoding with rectified attention against SDPA and a copy of the same bytes, on one GPU.

    python benchmarks/decode.py --out decode.json
    TRITON_INTERPRET=1 python benchmarks/decode.py --quick --out decode.json

Every tile is first compared with float64; one that is out of bounds gets no speed. A first pass
picks, for each width and way of record, the fastest of the candidates on one shape; it is then
used on all. Times are medians of interleaved rounds, ratios medians of the ratios within a round.
Calls walk over several copies of small inputs, so that nobody reads from the cache of the device.
`of copy` is the time in which the device copies half of the bytes of keys and values (reads and
writes count alike) over ours: above 1 where values are left unread. SDPA runs each backend twice,
with grouped heads as they are and with the heads of a group as query rows; the better one counts.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reluformer import PagedCache, decode_attention, relu_attention
from reluformer.bench.timing import Clock, ratio
from reluformer.ops.backends.triton import tuning
from reluformer.ops.backends.triton.tuning import Tile

BOUND = 3e-3
WAYS = ("whole", "skip", "paged", "paged bounds")
"""All values read; none without weight; the same from pages; and no page without weight."""


@dataclass(frozen=True)
class Data:
    """Kind of input: the share of keys, or of whole pages, without weight for all of a group."""

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
    """What is measured: the H200 run, or toy sizes that test this script on a CPU."""

    device: str
    dtype: torch.dtype
    shapes: tuple[Shape, ...]
    tuned_on: tuple[Shape, ...]
    """One for each width and number of queries."""
    page: int
    checked: Shape
    """What tiles are compared on, at every width and number of queries."""
    rounds: int
    workers: int
    footprint: int
    """Bytes that the copies of an input fill at least."""
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
    """Tiles worth timing; how far the keys are split is tried later, it needs no compilation."""
    if quick:
        return [Tile(16, 16, 4, 1, skip=way != "whole")]
    wide = {
        "whole": [(64, 4, 3), (64, 4, 4), (64, 4, 2), (32, 4, 4), (128, 8, 3), (64, 8, 3),
                  (32, 2, 4)],
        "skip": [(64, 4, 3), (64, 4, 2), (64, 8, 3), (128, 8, 2), (128, 8, 3), (32, 4, 3),
                 (32, 2, 3)],
        # The table is looked up in the same pipeline, which takes half of its stages.
        "paged": [(64, 4, 3), (64, 4, 5), (64, 8, 3), (32, 4, 5)],
        "paged bounds": [(64, 4, 3), (64, 4, 5), (64, 8, 3), (32, 4, 5)],
    }  # fmt: skip
    # Half the width: twice the keys are as many bytes.
    factor = 2 if width <= 64 else 1
    most = 64 if way == "paged bounds" else 256
    found = [
        Tile(16, min(keys * factor, most), warps, stages, skip=way != "whole")
        for keys, warps, stages in wide[way]
    ]
    return list(dict.fromkeys(found))


def inputs(plan: Plan, shape: Shape, data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v; keys without weight score below zero for every query, and the others above."""

    def normal(heads: int, length: int) -> Tensor:
        made = torch.empty(
            shape.batch, heads, length, shape.width, device=plan.device, dtype=plan.dtype
        )
        return made.normal_()

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


def cached(plan: Plan, k: Tensor, v: Tensor, bounds: bool) -> PagedCache:
    """The same keys and values in pages, those of the sequences mixed."""
    batch, heads, keys, width = k.shape
    cache = PagedCache(
        batch, heads, width, pages=batch * math.ceil(keys / plan.page), page_size=plan.page,
        max_length=keys, bounds=bounds, dtype=k.dtype, device=k.device,
    )  # fmt: skip
    for start in range(0, keys, 4096):
        part = slice(start, start + 4096)
        cache.append(k[:, :, part], v[:, :, part])
    return cache


def prepare(plan: Plan, way: str, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """One of our ways on one input, with a cache where it reads pages."""
    if way in ("whole", "skip"):
        return lambda: relu_attention(q, k, v, impl="triton")
    cache = cached(plan, k, v, bounds=way == "paged bounds")
    return lambda: decode_attention(q, cache, causal=False, impl="triton")


# Way, width and number of queries.
Case = tuple[str, int, int]
Allowed = dict[Case, list[Tile]]
Chosen = dict[Case, Tile]


def check_tile(job: tuple[Plan, str, int, int, Tile]) -> dict[str, Any]:
    """Compile one tile and compare it with float64; runs in a worker, where it fills the cache."""
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
                found = call().double()
            wanted = relu_attention(q.double(), k.double(), v.double(), impl="reference")
            error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-6))
            # A NaN stays: every comparison with it is false.
            worst = error if not error <= worst else worst
    except Exception as problem:
        return {**entry, "ok": False, "error": f"{type(problem).__name__}: {problem}"[:300]}
    return {**entry, "ok": worst <= BOUND, "error": worst}


def gate(plan: Plan) -> Allowed:
    """The candidates that agree with float64, for each way, width and number of queries."""
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
    found: Allowed = {}
    for entry in entries:
        if entry["ok"]:
            key = (entry["way"], entry["width"], entry["queries"])
            found.setdefault(key, []).append(Tile(**entry["tile"]))
        else:
            print("out of bounds or refused:", json.dumps(entry), flush=True)
    print(f"{sum(map(len, found.values()))} of {len(jobs)} tiles within bounds", flush=True)
    return found


class Inputs:
    """Enough copies of one input to fill more than a cache, walked over call by call."""

    def __init__(self, plan: Plan, shape: Shape, data: Data) -> None:
        size = 2 * shape.batch * shape.kv_heads * shape.keys * shape.width * plan.dtype.itemsize
        self.bytes, self.plan, self.shape = size, plan, shape
        copies = max(1, math.ceil(plan.footprint / size))
        self.sets = [inputs(plan, shape, data) for _ in range(copies)]
        self.copies = cycle([(torch.empty_like(k), k) for _, k, _ in self.sets])

    def ours(self, way: str) -> Callable[[Tile], None]:
        """One of our ways, for any tile."""
        turn = cycle([prepare(self.plan, way, *each) for each in self.sets])

        def call(tile: Tile) -> None:
            with tuning.override({"decode": tile}):
                next(turn)()

        return call

    def peer(self, backend: str, packed: bool) -> Callable[[], Any]:
        """SDPA; packed, the heads of a group are query rows of their key/value head."""
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
        """SDPA's backends that run this shape."""
        found = {}
        for name, backend in self.plan.peers:
            # It keeps all scores, and grouped keys once per head.
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
                found[name + " packed" * packed] = call
        return found

    def copy(self) -> None:
        """As many bytes read and written as keys and values have."""
        target, source = next(self.copies)
        target.copy_(source)


def tune(plan: Plan, clock: Clock, allowed: Allowed) -> tuple[Chosen, list[dict[str, Any]]]:
    """The fastest permitted tile for each way and width, and all times, best first."""
    chosen: Chosen = {}
    report: list[dict[str, Any]] = []
    data = {"whole": FULL, "skip": SPARSE, "paged": FULL, "paged bounds": CLUSTERED}
    for shape in plan.tuned_on:
        for way in WAYS:
            found = allowed.get((way, shape.width, shape.queries), [])
            if plan.device == "cuda":
                found = [replace(tile, programs=count) for tile in found for count in (2, 4, 8)]
            if not found:
                continue
            call = Inputs(plan, shape, data[way]).ours(way)
            times = clock.rounds({str(tile): partial(call, tile) for tile in found}, 3, 0.0)
            # The clock leaves out who is far behind.
            found = [tile for tile in found if str(tile) in times]
            medians = {tile: statistics.median(times[str(tile)]) for tile in found}
            ranked = sorted(found, key=medians.__getitem__)
            chosen[way, shape.width, shape.queries] = ranked[0]
            report += [
                {"way": way, "shape": str(shape), "tile": asdict(tile), "ms": medians[tile]}
                for tile in ranked
            ]
    return chosen, report


def measure(plan: Plan, shape: Shape, data: Data, clock: Clock, chosen: Chosen) -> dict[str, Any]:
    """One row: times, rates and ratios of all contestants on one kind of data."""
    given = Inputs(plan, shape, data)
    ways = WAYS[:2] if data in (RANDOM, SPARSE) else WAYS
    calls: dict[str, Callable[[], Any]] = {"copy": given.copy, **given.peers()}
    for way in ways:
        tile = chosen.get((way, shape.width, shape.queries))
        if tile is not None:
            calls[way] = partial(given.ours(way), tile)
    times = clock.rounds(calls, plan.rounds, 0.0, yardstick="copy")
    peers = [name for name in times if name not in (*WAYS, "copy")]
    best = min(peers, key=lambda name: statistics.median(times[name]), default=None)
    row: dict[str, Any] = {
        "shape": str(shape), **asdict(shape), "data": data.name, "bytes": given.bytes, "peer": best,
    }  # fmt: skip
    for name, found in times.items():
        row[name] = {
            "ms": statistics.median(found),
            "low": min(found),
            "high": max(found),
            "TB/s": given.bytes / statistics.median(found) / 1e9,
            "of copy": ratio(found, times["copy"]),
            **({"x peer": ratio(found, times[best])} if best else {}),
            **({"host us": clock.host[name]} if name in clock.host else {}),
        }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The short table that is printed last."""
    lines = [f"{'shape':28} {'data':16} {'way':13} {'ms':>8} {'host us':>8} {'TB/s':>6} "
             f"{'of copy':>8} {'x peer':>7}  peer"]  # fmt: skip
    for row in rows:
        for name in ("copy", row["peer"], *WAYS):
            if name in row:
                found = row[name]
                lines.append(
                    f"{row['shape']:28} {row['data']:16} {name:13} {found['ms']:8.4f} "
                    f"{found.get('host us', math.nan):8.0f} {found['TB/s']:6.2f} "
                    f"{found['of copy']:8.2f} {found.get('x peer', math.nan):7.2f}  {row['peer']}"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=90.0, help="time for everything")
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
