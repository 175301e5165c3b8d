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
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from reluformer.ops.backends.triton import launch, run_backward, run_decode, run_forward, tuning

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from tests.ops.backends.triton.assembly import unguarded, unmade

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
# Width and whether causal: where nothing speaks for more, two of the four.
SHAPES = ((64, True), (128, False))


class Hopper:
    """As much of a driver as compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    found: dict[str, dict[str, int]] = {}
    label = ""

    def compile_only(kernel: Any, programs: int, args: list[Any], **options: Any) -> None:
        if "PTX" in options:
            options["PTX"] = True
        compiled = kernel.warmup(*args, grid=(programs,), **options)
        specialised = kernel.__name__.startswith("specialised")
        if "PTX" not in options and not specialised:
            return
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [str(TOOLS / "nvdisasm"), "-c", file.name]
            code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        counts = {name: len(re.findall(pattern, code)) for name, pattern in PATTERNS.items()}
        found[f"{kernel.__name__} {label}"] = {**counts, "shared": compiled.metadata.shared}
        if specialised:
            found[f"{kernel.__name__} {label}"] |= {
                "unguarded": unguarded(compiled.asm["ptx"]),
                "unmade": unmade(code),
            }

    driver.set_active(Hopper())
    launch.run = compile_only
    for width, causal in SHAPES:
        label = f"width {width}, causal {causal}"
        q = torch.empty(1, 4096, 2, width, dtype=torch.bfloat16).transpose(1, 2)
        problem = run_forward.Problem(
            q, q, q, None, None, None, None, None, None, None,
            width**-0.5, 1.0, 0.0, 0.5, 1, causal, 0, 0.0, 4096, 4096,
        )  # fmt: skip
        grads = run_backward.Gradients(None, None, torch.empty_like(q), None, None)
        with tuning.override(tma=True):
            run_forward.forward(problem, 0)
            run_backward.backward(problem, grads, False)
            label += ", without signs"
            with tuning.override(tma=True, sign_bytes=0):
                run_backward.backward(problem, grads, False)
            label = label.replace("without signs", "with row sums")
            run_forward.forward(problem, 1)
            label = label.replace("with row sums", "sampled entropies")
            rows = torch.empty(q.shape[:3])
            run_forward.forward(problem._replace(entropy_every=8), 2)
            grads = grads._replace(grad_sum=rows, grad_log=rows)
            run_backward.backward(problem._replace(entropy_every=8), grads, False)
    for width, rows in ((64, 1), (128, 16)):
        for page in (0, 64):
            label = f"width {width}, rows {4 * rows}, page {page}"
            decode(width, rows, page)
            label += ", with row sums"
            decode(width, rows, page, row_sums=True)
            label = label.replace("with row sums", "divided")
            decode(width, rows, page, row_normalise=1e-4)
    for (width, causal), row_normalise in itertools.product(SHAPES, (0.0, 1e-4)):
        label = f"width {width}, causal {causal}, power 4" + ", divided" * (row_normalise > 0)
        fourth_power(width, causal, row_normalise)
        label = f"width {width}, causal True, " + ("as in models" if row_normalise else "plain")
        specialised_forward(width, row_normalise)
    label = "width 128, sampled entropies"
    specialised_forward(128, 0.0, entropy_every=8)
    label = "width 64, packed"
    specialised_forward(64, 0.0, packed=True)
    for width, causal in itertools.product((64, 128), (False, True)):
        label = f"width {width}, causal {causal}"
        specialised_backward(width, causal, 1, None)
        power = 1 if causal == (width == 128) else 8
        label += ", scores" if power == 1 else ", power 8"
        specialised_backward(width, causal, power, 0)
    print(json.dumps(found))


def specialised_backward(width: int, causal: bool, power: int, sign_bytes: int | None) -> None:
    """A plain call, or above power 1 one of the models: padded, divided, a learned threshold."""
    q = torch.empty(1, 4096, 2, width, dtype=torch.bfloat16).transpose(1, 2)
    problem = run_forward.Problem(
        q, q, q, None, None, None, None, None, None, None,
        width**-0.5, 1.0, 0.0, 0.5, power, causal, 0, 0.0, 4096, 4096,
    )  # fmt: skip
    grads = run_backward.Gradients(None, None, torch.empty_like(q), None, None)
    if power > 1:
        lengths = torch.zeros(1, dtype=torch.int32)
        problem = problem._replace(
            key_lengths=lengths, threshold=torch.empty(2), row_normalise=1e-4
        )
        grads = grads._replace(out=torch.empty_like(q), row_sum=torch.empty(q.shape[:3]))
    with tuning.override(tma=True, sign_bytes=sign_bytes, specialised=True):
        run_backward.backward(problem, grads, need_shift=power > 1)


def specialised_forward(
    width: int, row_normalise: float, entropy_every: int = 0, packed: bool = False
) -> None:
    """A causal call with row sums: the models' where rows are divided, else a plain one."""
    q = torch.empty(1, 4096, 2, width, dtype=torch.bfloat16).transpose(1, 2)
    threshold, lengths = torch.empty(2), torch.zeros(1, dtype=torch.int32)
    problem = run_forward.Problem(
        q, q, q, None, None, None, None, None, None, None,
        width**-0.5, 1.0, 0.0, 0.5, 1, True, 0, 0.0, 4096, 4096,
    )  # fmt: skip
    if row_normalise:
        problem = problem._replace(
            threshold=threshold, key_lengths=lengths, power=8, row_normalise=row_normalise
        )
    if entropy_every:
        problem = problem._replace(entropy_every=entropy_every)
    if packed:
        ends = torch.zeros(3, dtype=torch.int32)
        problem = problem._replace(cu_q=ends, cu_k=ends)
    with tuning.override(tma=True, specialised=True):
        run_forward.forward(problem, 2 if entropy_every else 1)


def fourth_power(width: int, causal: bool, row_normalise: float) -> None:
    """Forward and backward with a learned threshold, without which this power is not used."""
    q = torch.empty(1, 4096, 2, width, dtype=torch.bfloat16).transpose(1, 2)
    problem = run_forward.Problem(
        q, q, q, None, torch.empty(2), None, None, None, None, None,
        width**-0.5, 1.0, 0.0, 0.5, 4, causal, 0, 0.0, 4096, 4096,
        row_normalise=row_normalise,
    )  # fmt: skip
    with tuning.override(tma=True):
        run_forward.forward(problem, int(problem.divided))
        grads = run_backward.Gradients(None, None, torch.empty_like(q), None, None)
        if problem.divided:
            grads = grads._replace(out=torch.empty_like(q), row_sum=torch.empty(q.shape[:3]))
        run_backward.backward(problem, grads, need_shift=True)


def decode(
    width: int, rows: int, page: int, row_sums: bool = False, row_normalise: float = 0.0
) -> None:
    """One call with four query heads per key head, to pages with bounds if `page` is their size."""
    q = torch.empty(2, 8, rows, width, dtype=torch.bfloat16)
    pages = lengths = None
    k = torch.empty(2, 2, 4096, width, dtype=torch.bfloat16)
    if page:
        k = torch.empty(4096 // page, 2, page, width, dtype=torch.bfloat16)
        table = torch.zeros(2, 4096 // page, dtype=torch.int32)
        pages = run_decode.Pages(table, k[:, :, 0].contiguous(), k[:, :, 0].contiguous())
        lengths = torch.zeros(2, dtype=torch.int32)
    problem = run_forward.Problem(
        q, k, k, None, None, lengths, None, None, None, None,
        width**-0.5, 1.0, 0.0, 0.5, 1, rows > 1, 0, 0.0, rows, 4096,
        row_normalise=row_normalise,
    )  # fmt: skip
    run_decode.decode(problem, pages, row_sums=row_sums)


if __name__ == "__main__":
    main()
