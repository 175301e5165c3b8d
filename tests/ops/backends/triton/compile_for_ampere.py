"""Compile portable kernels for GPUs before Hopper and print, as JSON, the resources they need.

The arguments are the compute capability, 80 or 89, head widths, separated by commas, and a dtype.
"""

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
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from reluformer.ops.backends.triton import plan, run_backward, run_forward, tuning
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from tests.ops.backends.triton.compile_for_hopper import PORTABLE, TOOLS, decode
from tests.ops.backends.triton.fake_driver import FakeDriver

EDGED: dict[str, Any] = {"causal": True, "power": 4}
SHARED = {80: 163 * 1024, 89: 99 * 1024}
"""Bytes of shared memory by compute capability: an A100, an RTX 4090."""
RESULTS: dict[str, dict[str, int]] = {}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {"registers": "REG", "stack": "STACK"}
    return {name: max(map(int, re.findall(rf"{key}:(\d+)", text))) for name, key in names.items()}


def install(capability: int) -> None:
    """Compile instead of launching."""
    original = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = original(kernel, *args, grid=grid, warmup=True, **options)
        if kernel.__name__ in PORTABLE:
            metadata = compiled.metadata
            RESULTS[f"{kernel.__name__} {len(RESULTS)}"] = {
                "shared": metadata.shared,
                **resources(compiled.asm["cubin"]),
                "threads": 32 * metadata.num_warps,
                "available": SHARED[capability],
            }

    JITFunction.run = compile_only
    plan.shared_memory = lambda problem: SHARED[capability]
    driver.set_active(FakeDriver(capability))


def train(call: Problem) -> None:
    """Forward and backward without row normalisation."""
    run_forward.forward(call, 0)
    run_backward.backward(call, run_backward.Gradients(torch.empty_like(call.q)), False)


def main() -> None:
    install(int(sys.argv[1]))
    dtype = getattr(torch, sys.argv[3])
    with tuning.override(hopper=False):
        for width in map(int, sys.argv[2].split(",")):
            # The longest and the shortest tiles of the tables, whole and with edges.
            for length, settings in ((4096, {}), (4096, EDGED), (300, EDGED)):
                q = torch.empty(1, length, 2, width, dtype=dtype).transpose(1, 2)
                call = Settings(width**-0.5, length, length, **settings)
                train(Problem(q, q, q, NO_INPUTS, call))
    decode(64, 1, 0)
    decode(128, 16, 64)
    print(json.dumps(RESULTS))


if __name__ == "__main__":
    main()
