"""Run the Triton kernels on small odd shapes under NVIDIA's compute-sanitizer.

    python -m benchmarks.sanitize

memcheck looks for accesses out of bounds, racecheck for hazards in shared memory. Every tensor has
its own allocation of its exact size. A first run without a tool compiles all kernels. memcheck
must report a canary kernel that writes out of bounds. initcheck is not used, because it must trace
all kernels of torch; the tests fill fresh memory with NaN instead. Prints a line for each tool.
The exit status is 1 if a tool reports an error or does not finish, and 2 without
compute-sanitizer.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from reluformer import decode_attention
from reluformer.ops.backends.triton import op, tuning
from reluformer.ops.call import Call, Packing
from reluformer.ops.rule import Rectified
from reluformer.ops.visibility import Visibility
from tests.ops.backends.triton.portable import test_decode, test_decode_gpu
from tests.ops.rectified import CASES, Arguments, Case, arguments, found

ROOT = Path(__file__).resolve().parents[1]
# This tool reports the hand-over to specialised warps that Triton generates.
PORTABLE_ONLY = "racecheck"
SMALL = (
    "causal window",
    "causal padding, nothing",
    "mask",
    "groups",
    "thresholds",
    "widths",
    "divided, padding, nothing",
    "divided, groups",
    "divided, mask",
)
WIDE = Case("tiles", queries=283, keys=301, width=64, value_width=64, heads=4)
DENSE = [
    *(case for case in CASES if case.name in SMALL),
    WIDE,
    replace(WIDE, causal=True, statistics=1, gamma=True),
    replace(WIDE, width=128, value_width=128, batch=2, key_lengths=(301, 77), causal=True),
    replace(WIDE, power=4, threshold=-1.0, causal=True, row_normalise=1e-4),
    replace(WIDE, statistics=2, kv_heads=2),
]
# Number of processes; compilation dominates.
SHARES = 8
ERROR_STATUS, TIME_LIMIT = 86, 400


def exact(given: Arguments) -> Arguments:
    """The same call on tensors with their own allocations."""
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in given.leaves.items()}
    given.options |= {name: leaf for name, leaf in leaves.items() if name in given.options}
    return Arguments(leaves, given.options, given.cotangents)


def work(
    share: int,
    *,
    hopper: bool = True,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Run one share of the calls: dense and packed with gradients, decoding from rows and pages.

    All shares together launch every kernel.

    Returns:
        The number of checked outputs.
    """
    torch.manual_seed(0)
    outputs = _dense(DENSE[share::SHARES], hopper, device, dtype)
    if share == SHARES - 1:
        outputs += _packed(hopper, device, dtype) + _dropout_and_decoding(device, dtype)
    torch.cuda.synchronize()
    assert all(bool(output.isfinite().all()) for output in outputs)
    return len(outputs)


def _dense(cases: list[Case], hopper: bool, device: str, dtype: torch.dtype) -> list[Tensor]:
    outputs: list[Tensor] = []
    for case in cases:
        # Descriptors or pointers, with either memory layout; the second launch reuses the first.
        for tma in (None, False):
            given = exact(arguments(case, dtype, device, transposed=tma is None))
            for sign_bytes in (0, 1 << 20):
                # Hopper kernels run where they can: head widths 64 and 128, by descriptors.
                chosen = hopper and sign_bytes > 0
                with tuning.override(tma=tma, sign_bytes=sign_bytes, hopper=chosen):
                    for _ in range(2):
                        outputs += found(op.attend, given)[0]
    return outputs


def _packed(hopper: bool, device: str, dtype: torch.dtype) -> list[Tensor]:
    outputs: list[Tensor] = []
    ends = torch.tensor([0, 283, 283, 300, 431], device=device, dtype=torch.int32)
    packing = Packing(ends, ends, 283, 283)
    for width in (64, 128):
        q, k, v = torch.randn(3, 440, 4, width, device=device).to(dtype).clone().unbind()
        leaves = [each.requires_grad_() for each in (q, k, v)]
        for causal, row_normalise in product((False, True), (None, 0.1)):
            with tuning.override(hopper=hopper):
                visibility = Visibility(causal=causal)
                call = Call(q, k, v, visibility, 0.1, return_sums="row_sum", packing=packing)
                output = op.attend(call, Rectified(row_normalise=row_normalise)).output
                outputs += [output, *torch.autograd.grad(output.float().square().sum(), leaves)]
    return outputs


def _dropout_and_decoding(device: str, dtype: torch.dtype) -> list[Tensor]:
    outputs: list[Tensor] = []
    dropped = exact(arguments(replace(WIDE, causal=True), dtype, device))
    dropped.options["dropout_p"] = 0.3
    for row_normalise in (None, 0.1):
        dropped.options["row_normalise"] = row_normalise
        outputs += found(op.attend, dropped)[0]
    for case in test_decode.CASES:
        given = exact(arguments(case, dtype, device))
        outputs += test_decode.results(given, tuning.Tile(16, 32, 4, 2))
    for queries in (1, 5):
        q = torch.randn(3, 8, queries, 64, device=device).to(dtype)
        cache = test_decode_gpu.filled(64, dtype)
        for row_normalise in (None, 0.01):
            options = {"threshold": 0.3, "row_normalise": row_normalise}
            outputs.append(decode_attention(q, cache, impl="triton", **options))
    return outputs


@triton.jit
def canary_kernel(out):
    """Write 61 elements beyond the end of `out`."""
    tl.store(out + tl.arange(0, 64), 1.0)


def kernel_names() -> list[str]:
    """Names of the canary and of all kernels of the package."""
    folder = ROOT / "reluformer" / "ops" / "backends" / "triton"
    sources = (path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))
    names = (
        name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.M)
    )
    return [canary_kernel.fn.__name__, *names]


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer, or None."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    paths = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(paths))


Done = tuple[int, str, float]
"""Exit status, output and duration in seconds of a process."""


def run_shares(prefix: list[str], task: str) -> Done:
    """Run a task, one process for each share; return a failed process, or the slowest."""
    shares = range(SHARES if task == "work" else 1)
    with ThreadPoolExecutor(SHARES) as pool:
        done = list(pool.map(lambda share: run_share(prefix, task, share), shares))
    return max(done, key=lambda result: (result[0] != 0, result[2]))


def run_share(prefix: list[str], task: str, share: int) -> Done:
    """Run one share of a task in a new process."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    command = [*prefix, sys.executable, "-m", "benchmarks.sanitize", "--task", task]
    command += ["--share", str(share), *(["--plain"] if PORTABLE_ONLY in prefix else [])]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=TIME_LIMIT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"not finished after {TIME_LIMIT} s", time.monotonic() - begin
    return done.returncode, done.stdout, time.monotonic() - begin


def verdict(tool: str, status: int, output: str, seconds: float) -> str:
    """One line about a tool."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip("= ")]
    summary = [line for line in lines if "SUMMARY" in line] or lines[-1:] or ["no output"]
    word = {0: "clean", ERROR_STATUS: "REPORTED ERRORS"}.get(status, f"FAILED ({status})")
    return f"{tool}: {word} in {seconds:.0f} s: {summary[-1]}"


def main() -> int:
    """Compile all kernels, then run each tool."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--task", choices=["work", "canary"], help="run one task in this process")
    parser.add_argument("--plain", action="store_true", help="portable kernels only")
    parser.add_argument("--share", type=int, default=0, help=f"number of the share, below {SHARES}")
    arguments = parser.parse_args()
    if arguments.task == "work":
        print(f"{work(arguments.share, hopper=not arguments.plain)} outputs")
        return 0
    if arguments.task == "canary":
        canary_kernel[(1,)](torch.zeros(3, device="cuda"))
        torch.cuda.synchronize()
        return 0
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is not in PATH or CUDA_HOME; install the CUDA toolkit")
        return 2
    common = ["--error-exitcode", str(ERROR_STATUS), "--report-api-errors", "no"]
    rounds = [("no tool", "work", 0), ("memcheck", "canary", ERROR_STATUS)]
    worst = 0
    for tool, task, wanted in rounds + [(tool, "work", 0) for tool in arguments.tools]:
        only = [word for name in kernel_names() for word in ("--kernel-name", f"kns={name}")]
        prefix = [] if tool == "no tool" else [sanitizer, "--tool", tool, *common, *only]
        status, output, seconds = run_shares(prefix, task)
        if status != wanted:
            worst = 1
            print("\n".join(output.splitlines()[-40:]))
        print(f"{task}, {verdict(tool, status, output, seconds)}", flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
