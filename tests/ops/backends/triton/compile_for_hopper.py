"""Compile the kernels for an H200 on any machine and print, as JSON, what the code consists of."""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from reluformer.ops.backends.triton import (
    plan,
    run_append,
    run_backward,
    run_decode,
    run_forward,
    tuning,
)
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from tests.ops.backends.triton.assembly import unguarded, unmade
from tests.ops.backends.triton.fake_driver import FakeDriver

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PATTERNS = {
    "spills": r"\bSTL",
    "packed rectifiers": r"F2FP\.RELU",
    "products": "HGMMA",
    "waits for products": r"WARPGROUP\.DEPBAR",
    "narrow products": r"\bHMMA",
    "asynchronous loads": "LDGSTS",
    "tensor memory loads": "UTMALDG",
}
PORTABLE = (
    "forward_kernel",
    "dkv_kernel",
    "dq_kernel",
    "one_pass_kernel",
    "decode_kernel",
    "append_kernel",
)
# Width and whether causal; two of the four combinations, where they suffice.
SHAPES = ((64, True), (128, False))


class Compiler:
    """Collects the code of every kernel that is launched, under the current label."""

    def __init__(self) -> None:
        self.label = ""
        self.results: dict[str, dict[str, int]] = {}

    def install(self) -> None:
        """Compile instead of launching, with inline PTX although tensors are on the CPU."""
        original = JITFunction.run

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self.add(kernel, original(kernel, *args, grid=grid, warmup=True, **options))

        JITFunction.run = compile_only
        plan.has_ptx = lambda problem: True
        driver.set_active(FakeDriver())

    def add(self, kernel: Any, compiled: Any) -> None:
        is_hopper = kernel.is_gluon()
        if kernel.__name__ not in PORTABLE and not is_hopper:
            return
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [str(TOOLS / "nvdisasm"), "-c", file.name]
            code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        counts = {name: len(re.findall(pattern, code)) for name, pattern in PATTERNS.items()}
        counts["shared"] = compiled.metadata.shared
        if is_hopper:
            counts |= {"unguarded": unguarded(compiled.asm["ptx"]), "unmade": unmade(code)}
        self.results[f"{kernel.__name__} {self.label}"] = counts


COMPILER = Compiler()


def problem(width: int, optional: dict[str, Tensor] | None = None, **settings: Any) -> Problem:
    """A bfloat16 call on 4,096 tokens and two heads."""
    q = torch.empty(1, 4096, 2, width, dtype=torch.bfloat16).transpose(1, 2)
    inputs = NO_INPUTS._replace(**(optional or {}))
    return Problem(q, q, q, inputs, Settings(width**-0.5, 4096, 4096, **settings))


def gradients(call: Problem) -> run_backward.Gradients:
    """Gradients of the output; with row normalisation, also what its backward needs."""
    grads = run_backward.Gradients(torch.empty_like(call.q))
    if call.is_row_normalised:
        rows = torch.empty(call.q.shape[:3])
        grads = grads._replace(out=torch.empty_like(call.q), row_sum=rows)
    return grads


def main() -> None:
    COMPILER.install()
    for width, causal in SHAPES:
        portable(width, causal)
    for width, rows in ((64, 1), (128, 16)):
        for page in (0, 64):
            name = f"width {width}, rows {4 * rows}, page {page}"
            COMPILER.label = name
            decode(width, rows, page)
            COMPILER.label = f"{name}, with row sums"
            decode(width, rows, page, row_sums=True)
            COMPILER.label = f"{name}, row-normalised"
            decode(width, rows, page, row_normalise=1e-4)
    COMPILER.label = "width 64"
    append(64)
    for (width, causal), row_normalise in itertools.product(SHAPES, (0.0, 1e-4)):
        normalised = ", row-normalised" * (row_normalise > 0)
        COMPILER.label = f"width {width}, causal {causal}, power 4{normalised}"
        fourth_power(width, causal, row_normalise)
        kind = "as in models" if row_normalise else "plain"
        COMPILER.label = f"width {width}, causal True, {kind}"
        hopper_forward(width, row_normalise)
    for power, row_normalise in ((2, 0.0), (4, 1e-4), (8, 1e-4)):
        normalised = ", row-normalised" * (row_normalise > 0)
        COMPILER.label = f"three consumers, causal False, power {power}{normalised}"
        hopper_full_power("three", 64, power, row_normalise)
    COMPILER.label = "three consumers, causal True, as in models"
    hopper_forward(64, 1e-4, tile="three")
    COMPILER.label = "three consumers, packed"
    hopper_forward(64, 0.0, packed=True, tile="three")
    for width in (64, 128):
        COMPILER.label = f"late, width {width}, power 4, row-normalised"
        hopper_full_power("late", width, 4, 1e-4)
    COMPILER.label = "late, width 128, causal True, as in models"
    hopper_forward(128, 1e-4, tile="late")
    COMPILER.label = "width 128, sampled entropies"
    hopper_forward(128, 0.0, entropy_every=8)
    COMPILER.label = "width 64, packed"
    hopper_forward(64, 0.0, packed=True)
    for width, causal in itertools.product((64, 128), (False, True)):
        name = f"width {width}, causal {causal}"
        COMPILER.label = name
        hopper_backward(width, causal, 1, None)
        power = 1 if causal == (width == 128) else 8
        COMPILER.label = f"{name}, scores" if power == 1 else f"{name}, power 8"
        hopper_backward(width, causal, power, 0)
        COMPILER.label = f"{name}, power 4, stored"
        hopper_backward(width, causal, 4, 0, gradient_bytes=64 << 20)
    for rows, causal in ((64, False), (64, True), (128, True)):
        COMPILER.label = f"width 128, causal {causal}, power 4, stored, compact, rows {rows}"
        choice = {"gradient_bytes": 64 << 20, "compact_gradients": True, "product_rows": rows}
        hopper_backward(128, causal, 4, 0, **choice)
    for causal, power in ((False, 2), (False, 4), (True, 4)):
        for tile in ("wide", "three"):
            COMPILER.label = f"{tile}, width 64, causal {causal}, power {power}"
            dkv_tile = "wide" if tile == "wide" else None
            hopper_backward(64, causal, power, 0, dkv_tile=dkv_tile, dq_tile=tile)
    for length, width in ((32, 64), (64, 64), (64, 128), (128, 64), (128, 128)):
        COMPILER.label = f"length {length}, width {width}"
        one_pass(length, width)
    # The kernel with the fewest registers to spare.
    COMPILER.label = "width 128, causal True, power 8"
    hopper_backward(128, True, 8, None)
    print(json.dumps(COMPILER.results))


def portable(width: int, causal: bool) -> None:
    """Calls of the portable kernels with different statistics."""
    name = f"width {width}, causal {causal}"
    call = problem(width, causal=causal)
    grads = gradients(call)
    COMPILER.label = name
    with tuning.override(tma=True):
        run_forward.forward(call, 0)
        run_backward.backward(call, grads, False)
        COMPILER.label = f"{name}, without signs"
        with tuning.override(tma=True, sign_bytes=0):
            run_backward.backward(call, grads, False)
        COMPILER.label = f"{name}, with row sums"
        run_forward.forward(call, 1)
        COMPILER.label = f"{name}, sampled entropies"
        call = problem(width, causal=causal, entropy_every=8)
        run_forward.forward(call, 2)
        rows = torch.empty(call.q.shape[:3])
        run_backward.backward(call, grads._replace(grad_sum=rows, grad_log=rows), False)


def hopper_backward(
    width: int, causal: bool, power: int, sign_bytes: int | None, **choice: Any
) -> None:
    """A plain call, or, above power 1, a call of the models: padded, row-normalised, learned."""
    call = problem(width, causal=causal, power=power)
    if power > 1:
        optional = {"key_lengths": torch.zeros(1, dtype=torch.int32), "threshold": torch.empty(2)}
        call = problem(width, optional, causal=causal, power=power, row_normalise=1e-4)
    choice = {"gradient_bytes": 0, "sign_bytes": sign_bytes, **choice}
    with tuning.override(tma=True, hopper=True, **choice):
        run_backward.backward(call, gradients(call), power > 1)


def one_pass(length: int, width: int) -> None:
    """A packed causal call of the models, whose gradients one kernel computes."""
    q = torch.empty(1, 4 * length, 2, width, dtype=torch.bfloat16).transpose(1, 2)
    ends = torch.zeros(5, dtype=torch.int32)
    optional = NO_INPUTS._replace(cu_q=ends, cu_k=ends, threshold=torch.empty(2))
    settings = Settings(width**-0.5, length, length, causal=True, power=4, row_normalise=1e-4)
    call = Problem(q, q, q, optional, settings)
    # Row values of packed calls are [tokens, heads].
    grads = gradients(call)._replace(row_sum=torch.empty(4 * length, 2))
    with tuning.override(one_pass=True):
        run_backward.backward(call, grads, True)


def hopper_full_power(tile: str, width: int, power: int, row_normalise: float) -> None:
    """A full call with thresholds, whose keys are whole tiles."""
    call = problem(width, {"threshold": torch.empty(2)}, power=power, row_normalise=row_normalise)
    with tuning.override(tma=True, hopper=True, forward_tile=tile):
        run_forward.forward(call, int(call.is_row_normalised))


def hopper_forward(
    width: int,
    row_normalise: float,
    entropy_every: int = 0,
    packed: bool = False,
    tile: str = "two",
) -> None:
    """A causal call with row sums: a call of the models if rows are normalised, else plain."""
    optional: dict[str, Tensor] = {}
    settings: dict[str, Any] = {"causal": True}
    if row_normalise:
        lengths = torch.zeros(1, dtype=torch.int32)
        optional = {"threshold": torch.empty(2), "key_lengths": lengths}
        settings |= {"power": 8, "row_normalise": row_normalise}
    if entropy_every:
        settings["entropy_every"] = entropy_every
    if packed:
        ends = torch.zeros(3, dtype=torch.int32)
        optional = {"cu_q": ends, "cu_k": ends}
    with tuning.override(tma=True, hopper=True, forward_tile=tile):
        run_forward.forward(problem(width, optional, **settings), 2 if entropy_every else 1)


def fourth_power(width: int, causal: bool, row_normalise: float) -> None:
    """Forward and backward with a learned threshold, which this power is always used with."""
    optional = {"threshold": torch.empty(2)}
    call = problem(width, optional, causal=causal, power=4, row_normalise=row_normalise)
    with tuning.override(tma=True):
        run_forward.forward(call, int(call.is_row_normalised))
        run_backward.backward(call, gradients(call), True)


def decode(
    width: int, rows: int, page: int, row_sums: bool = False, row_normalise: float = 0.0
) -> None:
    """A call with four query heads per key head; `page` is the page size, 0 without pages."""
    q = torch.empty(2, 8, rows, width, dtype=torch.bfloat16)
    k = torch.empty(2, 2, 4096, width, dtype=torch.bfloat16)
    optional, table = NO_INPUTS, None
    if page:
        k = torch.empty(4096 // page, 2, page, width, dtype=torch.bfloat16)
        table = torch.zeros(2, 4096 // page, dtype=torch.int32)
        optional = NO_INPUTS._replace(key_lengths=torch.zeros(2, dtype=torch.int32))
    settings = Settings(
        width**-0.5, rows, 4096, causal=rows > 1, row_normalise=row_normalise
    )  # fmt: skip
    run_decode.decode(Problem(q, k, k, optional, settings), table, row_sums=row_sums)


def append(width: int) -> None:
    """Store three tokens of two sequences in pages of 64 tokens."""
    new = torch.empty(2, 2, 3, width, dtype=torch.bfloat16)
    pages = torch.empty(8, 2, 64, width, dtype=torch.bfloat16)
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    run_append.append(new, new, run_append.PagePool(pages, pages, table, lengths), None)


if __name__ == "__main__":
    main()
