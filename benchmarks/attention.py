"""Fused rectified attention against SDPA and a large matrix product, in one run on one GPU.

    python benchmarks/attention.py --out attention.json --seconds 480
    TRITON_INTERPRET=1 python benchmarks/attention.py --quick --out attention.json

Every kernel and tile is first compared with float64; one that is out of bounds gets no speed. Times
are medians of interleaved rounds, ratios medians of the ratios within a round. TFLOP/s count
4 B H n^2 d for the forward, half of it if causal, 2.5 times that for the backward.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reluformer.ops.triton import op, tiles
from reluformer.ops.triton.layout import empty_heads
from reluformer.ops.triton.tiles import Kernel, Tile

FORWARD_BOUND, BACKWARD_BOUND = 3e-3, 6e-3


@dataclass(frozen=True)
class Plan:
    """What is measured: the H200 run, or toy sizes that test this script on a CPU."""

    device: str
    dtype: torch.dtype
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int
    model_width: int
    check_length: int
    matmul: int
    rounds: int
    workers: int
    peers: tuple[tuple[str, str], ...]
    """Name and SDPA backend; by name, because some versions of torch cannot pickle backends."""


GPU = Plan(
    "cuda", torch.bfloat16, (64, 128), (1024, 4096, 16384), 16384, 2048, 1000, 8192, 15, 12,
    (("cudnn", "CUDNN_ATTENTION"), ("flash", "FLASH_ATTENTION")),
)  # fmt: skip
TOY = Plan(
    "cpu", torch.float32, (16,), (32, 48), 48, 16, 40, 64, 2, 0, (("math", "MATH"),)
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One row of the table."""

    width: int
    causal: bool
    length: int

    def __str__(self) -> str:
        return f"d {self.width}, {'causal' if self.causal else 'full'}, n {self.length}"

    def flops(self, batch: int, heads: int) -> float:
        return 4.0 * batch * heads * self.length**2 * self.width * (0.5 if self.causal else 1.0)


def candidates(kernel: Kernel, width: int, causal: bool, quick: bool) -> list[Tile]:
    """Tiles worth timing, the table's own first."""
    if quick:
        return [Tile(16, 16, 4, 1), Tile(32, 16, 4, 1, one_loop=True)]
    small = {
        "forward": [(128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 4, 2), (128, 128, 8, 2),
                    (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 4)],
        "keys": [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 3), (64, 128, 8, 2),
                 (128, 64, 4, 2), (128, 128, 8, 2)],
        "queries": [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 8, 2),
                    (128, 64, 4, 2), (64, 128, 4, 2)],
    }  # fmt: skip
    large = {
        "forward": [(256, 64, 8, 3), (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3),
                    (128, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3)],
        "keys": [(64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
                 (64, 64, 8, 3)],
        "queries": [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3)],
    }  # fmt: skip
    plain = [Tile(*each) for each in (small if width <= 64 else large)[kernel]]
    if not causal:
        return plain
    if kernel == "keys":
        return plain + [Tile(*each, prescale=True) for each in _plain(plain[:4])]
    return plain + [Tile(*each, one_loop=True) for each in _plain(plain[:5])]


def _plain(found: list[Tile]) -> list[tuple[int, int, int, int]]:
    return [(tile.queries, tile.keys, tile.warps, tile.stages) for tile in found]


def inputs(
    plan: Plan, shape: Shape, batch: int, heads: int, kv_heads: int | None = None
) -> list[Tensor]:
    """q, k, v and the output gradient, views of [B, T, H, D] as a model makes them."""
    counts = (heads, kv_heads or heads, kv_heads or heads, heads)
    return [
        torch.randn(batch, shape.length, count, shape.width, device=plan.device)
        .to(plan.dtype)
        .transpose(1, 2)
        for count in counts
    ]


def options(shape: Shape) -> dict[str, Any]:
    return {
        "scale": shape.width**-0.5, "gamma": 1.0, "length_exponent": 0.5, "power": 1,
        "threshold": 0.0, "causal": shape.causal, "window": None, "key_lengths": None,
        "mask": None, "dropout_p": 0.0, "statistics": 0,
    }  # fmt: skip


def reference(shape: Shape, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, dq, dk, dv by the formula in float64."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (q, k, v))
    weight = torch.relu(q @ k.transpose(-2, -1)) * shape.width**-0.5
    n = torch.full((shape.length, 1), float(shape.length), device=q.device, dtype=torch.float64)
    if shape.causal:
        weight = weight.tril()
        n = torch.arange(1, shape.length + 1, device=q.device, dtype=torch.float64)[:, None]
    out = (weight / (n / 2).sqrt()) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def errors(plan: Plan, shape: Shape) -> dict[str, float]:
    """Relative errors of one small call, under whatever tiles are set."""
    torch.manual_seed(0)
    q, k, v, grad = inputs(plan, shape, 1, 2)
    wanted = reference(shape, q, k, v, grad)
    for leaf in (q, k, v):
        leaf.requires_grad_()
    out, _, _ = op.rectified_attention(q, k, v, **options(shape))
    got = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    return {
        name: float((mine.double() - true).norm() / true.norm())
        for name, mine, true in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True)
    }


def within_bounds(found: dict[str, float]) -> bool:
    # NaN compares false, so it is out of bounds.
    return all(
        value <= (FORWARD_BOUND if name == "out" else BACKWARD_BOUND)
        for name, value in found.items()
    )


def check_tile(job: tuple[Plan, Kernel, int, bool, Tile]) -> dict[str, Any]:
    """Compile one tile and compare it with float64; runs in a worker, where it fills the cache."""
    plan, kernel, width, causal, tile = job
    shape = Shape(width, causal, plan.check_length)
    entry = {"kernel": kernel, "width": width, "causal": causal, "tile": asdict(tile)}
    try:
        with tiles.override({kernel: tile} if plan.device == "cuda" else {**_toy(), kernel: tile}):
            found = errors(plan, shape)
    except Exception as problem:
        return {**entry, "ok": False, "error": f"{type(problem).__name__}: {problem}"[:300]}
    return {**entry, "ok": within_bounds(found), "errors": found}


def _toy() -> dict[Kernel, Tile]:
    tile = Tile(16, 16, 4, 1)
    return {"forward": tile, "keys": tile, "queries": tile}


class Clock:
    """Times calls on the device: the queue is filled behind a pause, so launches cost nothing."""

    def __init__(self, plan: Plan) -> None:
        self.cuda = plan.device == "cuda"
        self.host: dict[str, float] = {}
        """Microseconds until a call returns, of the last `rounds`."""

    def once(self, call: Callable[[], Any], repeat: int, pause_us: float) -> float:
        """Milliseconds per call."""
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            return (time.perf_counter() - start) * 1e3 / repeat
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2000 * pause_us))
        first.record()
        for _ in range(repeat):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / repeat

    def rounds(self, calls: dict[str, Callable[[], Any]], count: int) -> dict[str, list[float]]:
        """Times of every call in `count` interleaved rounds; the order turns by one each."""
        repeats = {}
        self.host = {}
        for name, call in calls.items():
            call()
            once = self.once(call, 1, 1000.0)
            repeats[name] = max(1, min(20, math.ceil(2.0 / max(once, 1e-3)))) if self.cuda else 1
            if self.cuda:
                self.host[name] = self._host(call)
        times: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for at in range(count):
            for name in names[at % len(names) :] + names[: at % len(names)]:
                pause = 200.0 + 1.5 * repeats[name] * self.host.get(name, 0.0)
                times[name].append(self.once(calls[name], repeats[name], pause))
        return times

    def _host(self, call: Callable[[], Any]) -> float:
        """Median microseconds of ten calls behind a pause."""
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)
        found = []
        for _ in range(10):
            start = time.perf_counter()
            call()
            found.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
        return statistics.median(found)


def calls_for(
    plan: Plan, shape: Shape, batch: int, heads: int, given: list[Tensor]
) -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    """The contestants of each mode, lazily: a mode's graphs are freed before the next."""
    q, k, v, grad = given
    leaves = (q, k, v)
    settings = options(shape)

    def ours(statistics: int = 0) -> Tensor:
        return op.rectified_attention(q, k, v, **{**settings, "statistics": statistics})[0]

    def peer(backend: str) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=shape.causal)

    makers: dict[str, Callable[[], Tensor]] = {
        "ours": ours,
        **{name: (lambda backend=backend: peer(backend)) for name, backend in plan.peers},
    }  # fmt: skip
    size = plan.matmul
    a, b = (torch.randn(size, size, device=plan.device).to(plan.dtype) for _ in range(2))
    product = {"matmul": lambda: a @ b}

    def without_graph(make: Callable[[], Tensor]) -> Callable[[], Any]:
        def call() -> None:
            with torch.no_grad():
                make()

        return call

    yield "forward", {
        **{name: without_graph(make) for name, make in makers.items()},
        "ours row sums": without_graph(lambda: ours(statistics=1)),
        "ours entropy": without_graph(lambda: ours(statistics=2)),
        **product,
    }  # fmt: skip
    for leaf in leaves:
        leaf.requires_grad_()
    outputs = {name: make() for name, make in makers.items()}
    yield (
        "backward",
        {
            **{
                name: (lambda out=out: torch.autograd.grad(out, leaves, grad, retain_graph=True))
                for name, out in outputs.items()
            },
            **product,
        },
    )
    outputs.clear()
    yield (
        "both",
        {
            **{
                name: (lambda make=make: torch.autograd.grad(make(), leaves, grad))
                for name, make in makers.items()
            },
            **product,
        },
    )


def measure(
    plan: Plan, shape: Shape, clock: Clock, bad: set[str], chosen: dict[Kernel, Tile]
) -> dict[str, Any]:
    """One row: times, rates and ratios for forward, backward and both."""
    batch, heads = max(1, plan.tokens // shape.length), max(1, plan.model_width // shape.width)
    row: dict[str, Any] = {"shape": str(shape), **asdict(shape), "batch": batch, "heads": heads}
    row["tiles"] = {kernel: asdict(tile) for kernel, tile in chosen.items()}
    base = shape.flops(batch, heads)
    counted = {"forward": base, "backward": 2.5 * base, "both": 3.5 * base}
    given = inputs(plan, shape, batch, heads)
    with tiles.override(chosen if plan.device == "cuda" else _toy()):
        for mode, calls in calls_for(plan, shape, batch, heads, given):
            for name in bad & set(calls):
                del calls[name]
            times = clock.rounds(calls, plan.rounds)
            row[mode] = {
                name: _entry(name, found, times, counted[mode], plan) | _host(clock, name)
                for name, found in times.items()
            }
    return row


def _host(clock: Clock, name: str) -> dict[str, float]:
    return {"host us": clock.host[name]} if name in clock.host else {}


def _entry(
    name: str, found: list[float], times: dict[str, list[float]], flops: float, plan: Plan
) -> dict[str, float]:
    if name == "matmul":
        flops = 2.0 * plan.matmul**3
    entry = {
        "ms": statistics.median(found),
        "low": min(found),
        "high": max(found),
        "tflops": flops / statistics.median(found) / 1e9,
    }
    if name.startswith("ours"):
        for other in (*(peer for peer, _ in plan.peers), "ours"):
            if other in times and other != name:
                pairs = [theirs / mine for mine, theirs in zip(found, times[other], strict=True)]
                entry[f"x {other}"] = statistics.median(pairs)
    return entry


def tune(
    plan: Plan, shape: Shape, clock: Clock, allowed: dict[tuple[Any, ...], bool], deadline: float
) -> dict[str, list[dict[str, Any]]]:
    """Milliseconds of every permitted tile of every kernel, best first."""
    from reluformer.ops.triton import launch

    batch, heads = max(1, plan.tokens // shape.length), max(1, plan.model_width // shape.width)
    q, k, v, grad = inputs(plan, shape, batch, heads)
    problem = launch.Problem(
        q, k, v, None, None, None, None, None, None, None,
        shape.width**-0.5, 1.0, 0.0, 0.5, 1, shape.causal, 0, 0.0, shape.length, shape.length,
    )  # fmt: skip
    grads = launch.Gradients(None, None, grad, None, None)
    dq, dk, dv = (empty_heads(each, shape.width, zero=False) for each in (q, k, v))

    def key() -> tuple[Any, ...]:
        return launch.signature((False, *problem[10:]), (*problem.tensors, *grads))

    runs: dict[Kernel, Callable[[], Any]] = {
        "forward": lambda: launch.forward(problem, 0),
        "keys": lambda: launch.key_gradients(problem, grads, key(), dk, dv),
        "queries": lambda: launch.query_gradients(problem, grads, key(), dq, None, None),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel, call in runs.items():
        calls = {}
        for tile in candidates(kernel, shape.width, shape.causal, plan.device == "cpu"):
            if allowed.get((kernel, shape.width, shape.causal, tile)):
                calls[tile] = _under(kernel, tile, call)
        if time.monotonic() > deadline or not calls:
            break
        times = clock.rounds({str(at): each for at, each in enumerate(calls.values())}, 5)
        ranked = sorted(
            zip(calls, times.values(), strict=True), key=lambda x: statistics.median(x[1])
        )
        found[kernel] = [
            {"tile": asdict(tile), "ms": statistics.median(each)} for tile, each in ranked
        ]
    return found


def _under(kernel: Kernel, tile: Tile, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with tiles.override({kernel: tile}):
            call()

    return run


def extras(plan: Plan, clock: Clock) -> dict[str, Any]:
    """What features cost: forward and backward times relative to the plain call of that shape."""
    width, length = plan.widths[0], plan.lengths[-2]
    shape = Shape(width, False, length)
    batch, heads = max(1, plan.tokens // length), max(1, plan.model_width // width)
    settings = options(shape)
    device = plan.device

    def pair(kv_heads: int, **change: Any) -> Callable[[], Any]:
        q, k, v, grad = inputs(plan, shape, batch, heads, kv_heads)
        for leaf in (q, k, v):
            leaf.requires_grad_()

        def call() -> None:
            out, *_ = op.rectified_attention(q, k, v, **{**settings, **change})
            torch.autograd.grad(out, (q, k, v), grad)

        return call

    q, k, v, grad = (
        each.transpose(1, 2).reshape(-1, heads, width).requires_grad_()
        for each in inputs(plan, shape, batch, heads)
    )
    ends = torch.arange(batch + 1, device=device, dtype=torch.int32) * length
    packed = {name: settings[name] for name in settings if name not in ("key_lengths", "mask")}

    def varlen() -> None:
        out, *_ = op.rectified_attention_varlen(q, k, v, ends, ends, length, length, **packed)
        torch.autograd.grad(out, (q, k, v), grad)

    calls = {
        "plain": pair(heads),
        "eight query heads per key head": pair(max(1, heads // 8)),
        "key lengths": pair(heads, key_lengths=torch.full((batch,), length, device=device)),
        "gamma": pair(heads, gamma=torch.ones(heads, device=device)),
        "threshold": pair(heads, threshold=torch.zeros(heads, device=device)),
        "power two": pair(heads, power=2),
        "dropout": pair(heads, dropout_p=0.1),
        "packed": varlen,
        "window": pair(heads, window=length // 4),
    }
    with tiles.override({} if plan.device == "cuda" else _toy()):
        times = clock.rounds(calls, max(2, plan.rounds // 2))
    plain = statistics.median(times["plain"])
    return {
        "shape": str(shape),
        "relative": {name: statistics.median(found) / plain for name, found in times.items()},
    }


def gate(plan: Plan, sweep: bool) -> list[dict[str, Any]]:
    """Check the default tiles and, for a sweep, every candidate, in parallel worker processes."""
    quick = plan.device == "cpu"
    jobs = []
    kernels: tuple[Kernel, ...] = ("forward", "keys", "queries")
    for width in plan.widths:
        for causal in (False, True):
            for kernel in kernels:
                wanted = [] if quick else tiles.every(kernel, width, plan.dtype.itemsize)
                if sweep or quick:
                    wanted += candidates(kernel, width, causal, quick)
                jobs += [(plan, kernel, width, causal, tile) for tile in dict.fromkeys(wanted)]
    if not plan.workers:
        return [check_tile(job) for job in jobs]
    results = _in_workers(jobs, plan.workers)
    # A fault in one kernel spoils its process for those that follow: give them a fresh one each.
    for at, result in enumerate(results):
        if not result["ok"] and "errors" not in result and "CUDA" in result["error"]:
            results[at] = _in_workers([jobs[at]], 1)[0]
    return results


def _in_workers(jobs: list[Any], workers: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        pending = [pool.submit(check_tile, job) for job in jobs]
        results = []
        for job, each in zip(jobs, pending, strict=True):
            try:
                results.append(each.result())
            except BrokenProcessPool as problem:
                _, kernel, width, causal, tile = job
                entry = {"kernel": kernel, "width": width, "causal": causal, "tile": asdict(tile)}
                results.append({**entry, "ok": False, "error": f"CUDA or compiler died: {problem}"})
    return results


def table(rows: list[dict[str, Any]], plan: Plan) -> str:
    """The short table that is printed last."""
    peers = [name for name, _ in plan.peers]
    lines = ["shape                     mode      ours ms  host us  ours TF  matmul  "
             + "  ".join(f"x {name}" for name in peers)]  # fmt: skip
    for row in rows:
        for mode in ("forward", "backward", "both"):
            found = row.get(mode, {})
            ours = found.get("ours")
            if ours is None:
                lines.append(f"{row['shape']:25} {mode:9} out of bounds: no speed")
                continue
            cells = [f"{row['shape']:25} {mode:9} {ours['ms']:7.3f}"]
            cells += [f"{ours.get('host us', math.nan):8.0f} {ours['tflops']:8.1f}"]
            cells.append(f"{found['matmul']['tflops']:7.1f}")
            cells += [f"{ours.get(f'x {name}', math.nan):7.2f}" for name in peers]
            lines.append(" ".join(cells))
    return "\n".join(lines)


def usable_peers(plan: Plan) -> Plan:
    """The plan without SDPA backends that this machine lacks."""
    shape = Shape(plan.widths[0], True, plan.check_length)
    q, k, v, grad = inputs(plan, shape, 1, 2)
    usable = []
    for name, backend in plan.peers:
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                out = scaled_dot_product_attention(q.requires_grad_(), k, v, is_causal=True)
            torch.autograd.grad(out, q, grad)
            usable.append((name, backend))
        except RuntimeError as problem:
            print(f"no {name}: {str(problem)[:200]}", flush=True)
    return Plan(**{**plan.__dict__, "peers": tuple(usable)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=480.0, help="time for everything")
    parser.add_argument("--sweep", action="store_true", help="also time all candidate tiles")
    parser.add_argument("--quick", action="store_true", help="toy sizes on a CPU")
    arguments = parser.parse_args()
    start = time.monotonic()
    plan = usable_peers(TOY if arguments.quick else GPU)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "cudnn": torch.backends.cudnn.version(),
    }

    def left() -> float:
        return arguments.seconds - (time.monotonic() - start)

    def save() -> None:
        report["seconds"] = time.monotonic() - start
        arguments.out.write_text(json.dumps(report, indent=1))

    checks = report["checks"] = gate(plan, arguments.sweep)
    save()
    for entry in checks:
        if not entry["ok"]:
            print("out of bounds or refused:", json.dumps(entry), flush=True)
    allowed = {
        (entry["kernel"], entry["width"], entry["causal"], Tile(**entry["tile"])): entry["ok"]
        for entry in checks
    }
    print(
        f"{sum(allowed.values())} of {len(allowed)} tiles within bounds, {left():.0f} s left",
        flush=True,
    )
    clock = Clock(plan)
    rows = report["rows"] = []
    shapes = [
        Shape(width, causal, length)
        for length in plan.lengths for width in plan.widths for causal in (False, True)
    ]  # fmt: skip
    for shape in shapes:
        if left() < 20:
            break
        bad = refused(plan, shape, allowed, {})
        _guarded(
            report, str(shape), lambda s=shape, b=bad: rows.append(measure(plan, s, clock, b, {}))
        )
        save()
    print(table(rows, plan), flush=True)
    if left() > 30:
        _guarded(report, "extras", lambda: report.update(extras=extras(plan, clock)))
        print("relative to plain:", json.dumps(report.get("extras")), flush=True)
        save()
    if arguments.sweep:
        for shape in shapes:
            if left() > 20:
                _guarded(
                    report,
                    f"sweep, {shape}",
                    lambda s=shape: _sweep(plan, s, clock, allowed, report, left),
                )
                save()
        print(table(report.get("tuned", []), plan), flush=True)
    save()


def refused(
    plan: Plan, shape: Shape, allowed: dict[tuple[Any, ...], bool], chosen: dict[Kernel, Tile]
) -> set[str]:
    """Names of our contestants whose kernels, with the tiles they would use, are out of bounds."""
    if plan.device == "cpu":
        return set()

    def fine(kernel: Kernel) -> bool:
        tile = chosen.get(kernel) or tiles.pick(
            kernel, shape.width, shape.causal, shape.length, plan.dtype.itemsize
        )
        return allowed.get((kernel, shape.width, shape.causal, tile), False)

    if fine("forward") and fine("keys") and fine("queries"):
        return set()
    return {"ours", "ours row sums", "ours entropy"}


def _guarded(report: dict[str, Any], name: str, work: Callable[[], Any]) -> None:
    """Run one part; a failure is recorded and the rest goes on."""
    try:
        work()
    except Exception as problem:
        report.setdefault("failures", {})[name] = f"{type(problem).__name__}: {problem}"[:500]
        print(f"FAILED {name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)


def _sweep(
    plan: Plan,
    shape: Shape,
    clock: Clock,
    allowed: dict[tuple[Any, ...], bool],
    report: dict[str, Any],
    left: Callable[[], float],
) -> None:
    """Time the candidates, then measure the shape again with its winners."""
    found = tune(plan, shape, clock, allowed, time.monotonic() + left() - 15)
    report.setdefault("sweep", {})[str(shape)] = found
    best: dict[Kernel, Tile] = {}
    for kernel, ranked in found.items():
        best[kernel] = Tile(**ranked[0]["tile"])
        top = ", ".join(f"{_short(each['tile'])} {each['ms']:.3f}" for each in ranked[:4])
        print(f"{shape} {kernel}: {top}", flush=True)
    if left() > 15:
        row = measure(plan, shape, clock, refused(plan, shape, allowed, best), best)
        report.setdefault("tuned", []).append(row)


def _short(tile: dict[str, Any]) -> str:
    marks = "".join(name[0] for name in ("one_loop", "prescale") if tile[name])
    return f"({tile['queries']},{tile['keys']},{tile['warps']},{tile['stages']}{marks})"


if __name__ == "__main__":
    main()
