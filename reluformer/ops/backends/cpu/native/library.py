"""The native kernels as a shared library: its path, its build and its loading.

The library is plain C++ without torch, so that one build works with every version of torch. It is
built for this processor: its name holds a digest of the sources, the compiler options and the
processor's features, so that machines that share a home directory use different files.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from reluformer.errors import UserError
from reluformer.files import atomic_path

log = logging.getLogger("reluformer")

PROBLEM = struct.Struct(
    "="
    "9q"  # addresses: q, k, v, out, row_sums, score_offset, lengths, mask, factor
    "19q"  # strides of factor, q, k, v, out, mask
    "7q"  # batch, heads, rows, width, key_heads, keys, value_width
    "5q"  # power, causal, window, threads, is_bf16
    "2d"  # row_normalise, unit
    "7q"  # addresses: exact_out, grad, grad_sums, d_offset, dq, dk, dv
    "12q"  # strides of grad, dq, dk, dv
    "1q"  # address: row_dots
)
"""Layout of `Problem` in `problem.h`. A `ctypes.Structure` takes five times as long to fill."""

_SOURCES = Path(__file__).parent
_UNITS = ("attention.cpp", "decoder/decoder.cpp")
_TARGET = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w")
_OPTIONS = (*_TARGET, "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing")
_COMPILERS = ("g++", "c++", "clang++")

# In the order of `Bf16Products` in `products_bf16.h`.
_BF16_PRODUCTS = (None, "float32 vectors", "AVX-512 BF16", "AMX")


class Kernels:
    """The functions of a built library; each takes a packed `PROBLEM`."""

    def __init__(self, file: Path) -> None:
        self.file, library = file, ctypes.CDLL(str(file))
        self.library = library
        """The whole library, with the functions of `decoder/decoder.cpp`."""
        for name in ("problem_size", "few_rows", "bf16_products"):
            getattr(library, name).restype = ctypes.c_int64
        assert library.problem_size() == PROBLEM.size
        self.few_rows: int = library.few_rows()
        """Number of rows per key head below which a call is decoding."""
        self.bf16_products = _BF16_PRODUCTS[library.bf16_products()]
        """Instructions that multiply bfloat16 tables; None if the system forbids them."""
        self.forward = _typed(library.forward, ctypes.c_int64, ctypes.c_void_p)
        self.backward = _typed(library.backward, ctypes.c_int64, ctypes.c_void_p)
        self.forward_scratch = _typed(library.forward_scratch, ctypes.c_int64)
        self.backward_scratch = _typed(library.backward_scratch, ctypes.c_int64)


def available() -> bool:
    """Whether the kernels are built and can be loaded; does not build them."""
    return load() is not None


def summary() -> str:
    """A few words on the code that runs impl="cpu"."""
    kernels = load()
    if kernels is None:
        return "torch (python -m reluformer.ops.backends.cpu.native builds faster ones)"
    return f"compiled, bfloat16 by {kernels.bf16_products or 'torch'}"


@cache
def load() -> Kernels | None:
    """The kernels, or None if they are not built; looked up once in a process."""
    try:
        file = path()
        if not file.is_file():
            return None
        if not _is_intact(file):
            log.warning(
                "compiled CPU kernels are not used: %s is damaged "
                "(python -m reluformer.ops.backends.cpu.native builds it again)",
                file,
            )
            return None
        return Kernels(file)
    except (OSError, RuntimeError) as problem:
        # No home directory, or a missing shared-library dependency.
        log.warning("compiled CPU kernels are not used: %s", problem)
        return None


def path(folder: Path | None = None) -> Path:
    """Path of this machine's library, built or not; in the user's cache by default."""
    digest = hashlib.sha256(
        " ".join((*_OPTIONS, "sha256 at the end", platform.machine(), _processor())).encode()
    )
    for source in sorted([*_SOURCES.rglob("*.h"), *_SOURCES.rglob("*.cpp")]):
        digest.update(source.read_bytes())
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "reluformer")
    return folder / f"attention-{digest.hexdigest()[:16]}.so"


def build(folder: Path | None = None) -> Path:
    """Compile the library if it is missing, atomically, and return its path."""
    wanted = path(folder)
    if wanted.is_file() and _is_intact(wanted):
        return wanted
    compiler = os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        raise UserError(f"CXX must name a C++ compiler where none of {_COMPILERS} is installed")
    try:
        with atomic_path(wanted) as partial:
            units = [str(_SOURCES / unit) for unit in _UNITS]
            _compile([*compiler.split(), *_OPTIONS, *units, "-o", str(partial)])
            code = partial.read_bytes()
            # Loaders ignore bytes after the last section.
            partial.write_bytes(code + hashlib.sha256(code).digest())
            Kernels(partial)
    except OSError as problem:
        raise UserError(f"{wanted} cannot be built: {problem}") from None
    load.cache_clear()
    return wanted


def _is_intact(file: Path) -> bool:
    """Whether a library ends with the digest of its other bytes, as `build` writes it.

    A damaged library could end the process when it is loaded.
    """
    code = file.read_bytes()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(code[:-size]).digest() == code[-size:]


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as problem:
        raise UserError(f"CXX must name a C++ compiler, got {command[0]!r}: {problem}") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it says nothing"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise UserError(f"{command[0]} cannot compile {_UNITS[0]}: {first.strip()}")


def _typed(function: Any, result: Any, *more: Any) -> Any:
    function.argtypes, function.restype = [ctypes.c_char_p, *more], result
    return function


def _processor() -> str:
    """Features of the processor as the system lists them."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            # Only the first processor: the whole file is slow to read on large machines.
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()
