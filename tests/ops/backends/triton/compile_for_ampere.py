"""Compile portable kernels for GPUs before Hopper and print, as JSON, the resources they need.

The arguments are the compute capability, 80 or 89, and head widths, separated by commas.
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

from reluformer.ops.backends.triton import run_backward, run_forward, tuning
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from tests.ops.backends.triton.compile_for_hopper import PORTABLE, TOOLS, decode, problem
from tests.ops.backends.triton.fake_driver import FakeDriver

RESULTS: dict[str, dict[str, int]] = {}


def registers(cubin: bytes) -> int:
    """Registers of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r"REG:(\d+)", text)))


def install(capability: int) -> None:
    """Compile instead of launching."""
    original = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = original(kernel, *args, grid=grid, warmup=True, **options)
        if kernel.__name__ in PORTABLE:
            metadata = compiled.metadata
            RESULTS[f"{kernel.__name__} {len(RESULTS)}"] = {
                "shared": metadata.shared,
                "registers": registers(compiled.asm["cubin"]),
                "threads": 32 * metadata.num_warps,
            }

    JITFunction.run = compile_only
    driver.set_active(FakeDriver(capability))


def train(call: Problem) -> None:
    """Forward and backward without row normalisation."""
    run_forward.forward(call, 0)
    run_backward.backward(call, run_backward.Gradients(torch.empty_like(call.q)), False)


def main() -> None:
    install(int(sys.argv[1]))
    with tuning.override(hopper=False):
        for width in map(int, sys.argv[2].split(",")):
            train(problem(width))
            train(problem(width, causal=True, power=4))
        q = torch.empty(1, 2, 512, 64)
        train(Problem(q, q, q, NO_INPUTS, Settings(0.125, 512, 512)))
    decode(64, 1, 0)
    decode(128, 16, 64)
    print(json.dumps(RESULTS))


if __name__ == "__main__":
    main()
