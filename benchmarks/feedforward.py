"""Gains of fused epilogues in a ReLU feed-forward memory, on one GPU.

    python -m benchmarks.feedforward --out feedforward.json
    TRITON_INTERPRET=1 python -m benchmarks.feedforward --quick --out feedforward.json

The memory is ReLU(x K^T) V with N tokens, width w and s slots, in bfloat16. Forward and backward
are two and four products of 2 N w s FLOPs. Between them, h = ReLU(x K^T) [N, s] is accessed by

    ReLU, forward     reads and writes h            4 N s bytes
    ReLU, backward    reads dh and h, writes dh     6 N s bytes

At 4 TB/s and 700 TFLOP/s this is 29 % of the time of the products at w 512 and 14 % at w 1024, for
any s. An epilogue of the first product saves the first line. An epilogue of dh = dy V^T that reads
h saves 4 N s bytes of the second. A one-bit mask, stored by the forward, would save that epilogue
most of the remaining 2 N s bytes, at most 6 % and 3 %. It saves no memory: the gradient of V is
h^T dy, so h is stored anyway, or recomputed by a seventh product, which is 17 % more work.

"rest" is the time beyond the six products alone. "definition" is the formula in torch. "memory" is
the module of the package, with the first epilogue by cuBLASLt (`reluformer.ops.relu_linear`). The
Triton variants are matrix products with an epilogue, in the backward only or in both passes. On an
H200 at w 512 and s 2048 (w 1024, s 4096), the first epilogue saves 8 % (5 %) of forward and
backward, the second 3 % (1 %) more. The second is not worth a kernel, and neither is a mask.
"""

import argparse
import statistics
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from reluformer.bench.timing import Clock, in_short, ratio
from reluformer.files import write_json
from reluformer.info import commit, info
from reluformer.model.memory import KeyValueMemory
from reluformer.ops.relu_linear import relu_linear

MATMULS = "matmuls"
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
Tile = namedtuple("Tile", "rows columns depth warps stages")
Plan = namedtuple("Plan", "device dtype tokens sizes tiles")
TILES = (Tile(128, 256, 64, 8, 3), Tile(256, 128, 64, 8, 3), Tile(128, 128, 64, 8, 4))
GPU = Plan("cuda", torch.bfloat16, 16_384, ((512, 1024), (512, 2048), (1024, 4096)), TILES)
TOY = Plan("cpu", torch.float32, 64, ((16, 32),), (Tile(32, 16, 8, 4, 1),))


@triton.jit
def product_kernel(
    a, b, gate, out, columns, depth,
    GATED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """out = a b^T where `gate` is positive, else 0; without a gate, ReLU(a b^T).

    A program owns one tile [M, N] of out in registers and loops over K.
    """
    # Programs take columns first, because b fits into the L2 cache.
    at, across = tl.program_id(0), columns // N
    row, column = at // across * M, at % across * N
    total = tl.zeros((M, N), tl.float32)  # [M, N]
    for step in range(0, depth, K):
        total = tl.dot(a.load([row, step]), b.load([column, step]).T, total)
    total = tl.where(gate.load([row, column]) > 0, total, 0.0) if GATED else tl.maximum(total, 0.0)
    out.store([row, column], total.to(out.dtype))


def product(a: Tensor, b: Tensor, gate: Tensor | None, tile: Tile) -> Tensor:
    """ReLU(a b^T), or a b^T where the gate is above 0; a [N, w], b [s, w], the others [N, s]."""
    (rows, depth), columns = a.shape, len(b)
    assert rows % tile.rows == columns % tile.columns == depth % tile.depth == 0
    out, block = a.new_empty(rows, columns), [tile.rows, tile.columns]
    product_kernel[(rows // tile.rows * (columns // tile.columns),)](
        TensorDescriptor.from_tensor(a, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(b, [tile.columns, tile.depth]),
        TensorDescriptor.from_tensor(out if gate is None else gate, block),
        TensorDescriptor.from_tensor(out, block),
        columns, depth, gate is not None, tile.rows, tile.columns, tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


class Fused(torch.autograd.Function):
    """ReLU(x K^T) V with a Triton kernel in the backward and, if it has a tile, in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Any, keys: Any, values: Any, *tiles: Any) -> Tensor:
        forward_tile, ctx.backward_tile = tiles
        hidden = product(x, keys, None, forward_tile) if forward_tile else relu_linear(x, keys)
        ctx.save_for_backward(x, keys, values, hidden)
        return hidden @ values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, keys, values, hidden = ctx.saved_tensors
        grad_hidden = product(grad, values, hidden, ctx.backward_tile)
        return grad_hidden @ keys, grad_hidden.t() @ x, hidden.t() @ grad, None, None


def definition(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """ReLU(x K^T) V [N, w] in plain torch."""
    return (x @ keys.t()).relu() @ values


class Case:
    """One size: x [N, w], the implementations, and the gradient of their output."""

    def __init__(self, plan: Plan, width: int, slots: int) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": plan.device, "dtype": plan.dtype}
        memory = KeyValueMemory(width, slots).to(**options)
        self.x = torch.randn(plan.tokens, width, **options, requires_grad=True)
        self.grad = torch.randn(plan.tokens, width, **options)
        # As many zeros as in a memory, because zeros save power and so time.
        self.hidden = torch.randn(plan.tokens, slots, **options).relu()
        self.leaves = (self.x, memory.keys, memory.values)
        fused = partial(Fused.apply, *self.leaves)
        self.runs: dict[str, Callable[[], Tensor]] = {}
        ways = {"definition": (definition, self.leaves), "memory": (memory, (self.x,))}
        for name, (run, inputs) in ways.items():
            self.runs[name] = partial(run, *inputs)
            if plan.device == "cuda":
                compiled = torch.compile(run, dynamic=True)
                self.runs[f"{name}, compiled"] = partial(compiled, *inputs)
        for tile in plan.tiles:
            name = f"Triton {tile.rows}x{tile.columns}"
            self.runs[f"{name}, backward"] = partial(fused, None, tile)
            self.runs[f"{name}, both"] = partial(fused, tile, tile)

    def both(self, name: str) -> list[Tensor]:
        """Output and gradients of x, keys and values."""
        out = self.runs[name]()
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)]

    @torch.no_grad()
    def matmuls(self, backward: bool) -> None:
        """The matrix products alone."""
        _, keys, values = self.leaves
        _ = self.x @ keys.t(), self.hidden @ values
        if backward:
            _ = self.grad @ values.t(), self.hidden @ keys
            _ = self.hidden.t() @ self.x, self.hidden.t() @ self.grad

    def check(self, name: str) -> str | None:
        """Reason why an implementation is not timed; None if it agrees with float64."""
        try:
            results = self.both(name)
        except Exception as problem:
            return in_short(problem)
        x, keys, values = leaves = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        out = definition(x, keys, values)
        expected = [out.detach(), *torch.autograd.grad(out, leaves, self.grad.double())]
        worst = max(
            float((a - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True)
        )
        return None if worst <= TOLERANCE[self.x.dtype] else f"error {worst:.1e}"


def measure(case: Case, clock: Clock) -> list[dict[str, Any]]:
    """A row for each implementation: milliseconds, time beyond the products, memory."""
    rows: dict[str, dict[str, Any]] = {name: {"way": name} for name in (MATMULS, *case.runs)}
    for name, run in case.runs.items():
        reason = case.check(name)
        if reason is not None:
            rows[name]["refused"] = reason
        elif clock.cuda:
            before = torch.cuda.memory_allocated()
            out = run()
            rows[name]["kept_mib"] = (torch.cuda.memory_allocated() - before - out.nbytes) / 2**20
            del out
    timed = {name: run for name, run in case.runs.items() if "refused" not in rows[name]}
    whole = {name: partial(case.both, name) for name in timed}
    for mode, calls in (("forward", timed), ("both", whole)):
        calls = {**calls, MATMULS: partial(case.matmuls, mode == "both")}
        times = clock.rounds(calls, 10, 0.2 if clock.cuda else 0.0)
        for name, rounds in times.items():
            rows[name][mode] = statistics.median(rounds)
            rows[name][f"{mode}_rest"] = ratio(times[MATMULS], rounds) - 1
    return list(rows.values())


def main() -> None:
    """Measure all sizes, write JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="toy sizes on a CPU")
    arguments = parser.parse_args()
    plan = TOY if arguments.quick else GPU
    rows: list[dict[str, Any]] = []
    for width, slots in plan.sizes:
        results = measure(Case(plan, width, slots), Clock(plan.device))
        rows += [{"width": width, "slots": slots, **row} for row in results]
    write_json(arguments.out, {"commit": commit(), "machine": info(), "rows": rows})
    print(f"width slots {'way':24} forward ms  rest both ms  rest kept MiB")
    cells = "{forward:10.4f} {forward_rest:5.0%} {both:7.4f} {both_rest:5.0%} {kept_mib:8.1f}"
    for row in rows:
        shown = row.get("refused") or cells.format(**{"kept_mib": 0.0, **row})
        print(f"{row['width']:5} {row['slots']:5} {row['way']:24} {shown}")


if __name__ == "__main__":
    main()
