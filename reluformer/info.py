"""Environment for bug reports: versions, devices and implementations."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from reluformer import __version__
from reluformer.ops.backends.cpu.native import library
from reluformer.ops.backends.registry import BACKENDS, choose, why_not
from reluformer.ops.call import Call
from reluformer.ops.family.table import lookup
from reluformer.ops.visibility import Visibility

_PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "sacrebleu", "transformers")


def info() -> dict[str, Any]:
    """Collect versions, devices and implementations as plain values by topic."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "reluformer": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "threads": torch.get_num_threads(),
        "cpu kernels": library.summary(),
        "implementations": {kind: _implementations(kind, device) for kind in ("relu", "softmax")},
    }


def machine() -> dict[str, Any]:
    """The part of `info` that results carry: versions and devices."""
    described = info()
    return {name: described[name] for name in ("reluformer", "python", "packages", "devices")}


def commit() -> str | None:
    """Git commit of the package, followed by `+` if files have changed; None outside a checkout."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        revision = _git(root, "rev-parse", "HEAD")
        return revision + ("+" if _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _version(package: str) -> str | None:
    if package == "torch":
        # The metadata do not name the CUDA version of the build.
        return str(torch.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    devices = [f"cpu ({_processor()})"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        devices.append(
            f"cuda:{index} ({properties.name}, {memory:.0f} GiB, CUDA {torch.version.cuda})"
        )
    return devices


def _processor() -> str:
    """Name of the processor, or its architecture if the system does not report the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _implementations(kind: str, device: str) -> dict[str, str]:
    """State of each backend for a typical call on `device`, with the reason if it cannot run."""
    heads = torch.zeros(1, 1, 64, 64, device=device)
    call = Call(heads, heads, heads, Visibility(causal=True), scale=0.125)
    row = lookup(kind)
    rule = row.rectified({})
    chosen = choose(row, call, rule, "auto")
    states = {}
    for name, backend in BACKENDS.items():
        if backend.device not in (None, device):
            states[name] = f"needs {backend.device}"
        else:
            reason = why_not(backend, row, call, rule)
            states[name] = reason or ("available, chosen" if name == chosen else "available")
    return states
