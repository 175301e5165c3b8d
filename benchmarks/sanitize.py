"""Run the Triton kernels on small odd shapes under NVIDIA's compute-sanitizer.

    python -m benchmarks.sanitize --out sanitize.json

memcheck looks for accesses out of bounds, racecheck for hazards in shared memory, synccheck for
wrong barriers, initcheck for reads of memory that nothing wrote. First, memcheck must report a
canary kernel that writes out of bounds; where it does not, compute-sanitizer does not work, and
the exit status is 2. A run without a tool then compiles all kernels and lists those it launched
(`benchmarks.sanitize_calls`). The exit status is 1 if a tool reports a kernel of this package or
does not finish in time.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.sanitize_calls import SHARES, canary_kernel
from reluformer.files import write_json
from reluformer.info import commit, info

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "synccheck", "racecheck", "initcheck")
# This tool reports the hand-over to specialised warps that Triton generates.
PORTABLE_ONLY = "racecheck"
# This tool must see all writes, also those of torch's kernels.
ALL_KERNELS = "initcheck"
ERROR_STATUS, TIME_UP, CANARY_SECONDS = 86, 124, 60.0


class Done(NamedTuple):
    """A process that ended."""

    status: int
    """Exit status, or `TIME_UP`."""
    output: str


def kernel_names() -> list[str]:
    """Names of all kernels of the package."""
    folder = ROOT / "reluformer" / "ops" / "backends" / "triton"
    sources = (path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))
    return [name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)]


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer, or None."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    paths = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(paths))


def prefix(sanitizer: str, tool: str) -> list[str]:
    """The command that runs a process under a tool."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(ERROR_STATUS)]
    command += ["--report-api-errors", "no"]
    if tool != ALL_KERNELS:
        for name in (canary_kernel.fn.__name__, *kernel_names()):
            command += ["--kernel-name", f"kns={name}"]
    return command


def run(command: list[str], seconds: float) -> Done:
    """Run a command in a process group of its own, which ends with it."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, process_group=0,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Done(TIME_UP, f"{output}\nnot finished after {seconds:.0f} s")
    return Done(process.returncode, output)


def run_shares(task: str, sanitizer: list[str], options: list[str], seconds: float) -> list[Done]:
    """Run a task of `benchmarks.sanitize_calls` for all shares, one process each."""
    command = [*sanitizer, sys.executable, "-m", "benchmarks.sanitize_calls", task, *options]
    with ThreadPoolExecutor(SHARES) as pool:
        commands = [[*command, "--share", str(share)] for share in range(SHARES)]
        return list(pool.map(lambda each: run(each, seconds), commands))


def reports(outputs: list[str]) -> dict[str, int]:
    """Number of lines that report a place in a kernel of this package, by kernel."""
    counts = dict.fromkeys(kernel_names(), 0)
    for output in outputs:
        for name in re.findall(r"\bat (\w+_kernel)\b", output):
            if name in counts:
                counts[name] += 1
    return counts


def verdict(tool: str, done: list[Done]) -> dict[str, Any]:
    """Result of a tool: its verdict, and the reports by kernel."""
    counts = reports([each.output for each in done])
    # initcheck may report torch's own kernels; its exit status is then not about ours.
    allowed = (0, ERROR_STATUS) if tool == ALL_KERNELS else (0,)
    late = sum(each.status == TIME_UP for each in done)
    bad = next((each for each in done if each.status not in (*allowed, TIME_UP)), None)
    if any(counts.values()):
        word = "reported errors"
    elif bad is not None:
        word = f"failed ({bad.status}): {last_line(bad.output)}"
    else:
        word = f"not finished: {late} of {len(done)} processes" if late else "clean"
    return {"tool": tool, "verdict": word, "reports": {k: n for k, n in counts.items() if n}}


def last_line(output: str) -> str:
    """The last line with an error or, without one, the last line."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip("= ")]
    errors = [line for line in lines if "error" in line.lower() or "not supported" in line.lower()]
    return (errors or lines or ["no output"])[-1][:200]


def by_kernel(launched: set[str], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each kernel: whether it was launched, and the verdict of each tool."""
    rows = []
    for name in kernel_names():
        row: dict[str, Any] = {"kernel": name, "launched": name in launched}
        for result in results:
            is_left_out = result["tool"] == PORTABLE_ONLY and name.startswith("hopper")
            count = result["reports"].get(name, 0)
            finished = result["verdict"] in ("clean", "reported errors")
            word = f"{count} reports" if count else "clean" if finished else "not finished"
            row[result["tool"]] = "not run" if is_left_out or name not in launched else word
        rows.append(row)
    return rows


def main() -> int:
    """Try the canary, compile all kernels, then run each tool within the time limit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--seconds", type=float, default=400.0, help="time limit")
    options = parser.parse_args()
    end = (begin := time.monotonic()) + options.seconds
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is not in PATH or CUDA_HOME; install the CUDA toolkit")
        return 2
    calls = [sys.executable, "-m", "benchmarks.sanitize_calls"]
    canary = run([*prefix(sanitizer, "memcheck"), *calls, "canary"], CANARY_SECONDS)
    if canary.status != ERROR_STATUS:
        print(f"compute-sanitizer does not work on this machine: {last_line(canary.output)}")
        return 2
    compiled = run_shares("compile", [], [], end - time.monotonic())
    launched = {name for name in kernel_names() for each in compiled if f'"{name}"' in each.output}
    results = [verdict("no tool", compiled)]
    report: dict[str, Any] = {"commit": commit(), "machine": info(), "canary": "reported"}
    for tool in options.tools:
        print(f"{time.monotonic() - begin:5.0f} s: {results[-1]['verdict']}", flush=True)
        portable = ["--portable"] if tool == PORTABLE_ONLY else []
        done = run_shares("work", prefix(sanitizer, tool), portable, end - time.monotonic())
        results.append(verdict(tool, done))
        report |= {"seconds": time.monotonic() - begin, "tools": results}
        report["kernels"] = by_kernel(launched, results[1:])
        write_json(options.out, report)
    for row in report["kernels"]:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    for result in results:
        print(f"{result['tool']}: {result['verdict']}")
    is_clean = all(result["verdict"] == "clean" for result in results)
    return 0 if is_clean and all(row["launched"] for row in report["kernels"]) else 1


if __name__ == "__main__":
    sys.exit(main())
