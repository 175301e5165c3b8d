"""Cases of the benchmark: shapes, their inputs, and their FLOPs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from reluformer.errors import UserError

Group = Literal["dense", "decode", "features"]
Mode = Literal["forward", "backward", "both", "decode"]

MODES: dict[Group, tuple[Mode, ...]] = {
    "dense": ("forward", "backward", "both"),
    "decode": ("decode",),
    "features": ("forward", "both"),
}
DTYPES = ("bfloat16", "float16", "float32")

# FLOPs as multiples of the forward: it has two matrix products, the backward five.
_WORK: dict[Mode, float] = {"forward": 1.0, "backward": 2.5, "both": 3.5, "decode": 1.0}

# Mean of the scores in the hard regime, where one score in a thousand is positive.
_HARD_MEAN = -3.09


@dataclass(frozen=True)
class Case:
    """One problem: q [B, H, Tq, D], k and v [B, Hkv, Tk, D]."""

    group: Group
    device: str
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    causal: bool = False

    @property
    def name(self) -> str:
        """Name that `--only` matches and tables show."""
        mask = "causal" if self.causal else "full"
        kind = {"dense": mask, "decode": "decode", "features": f"features, {mask}"}[self.group]
        heads = f"{self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else f"{self.heads}"
        size = f"batch {self.batch}, heads {heads}"
        return f"{self.dtype}, d {self.width}, {kind}, n {self.keys}, {size}"

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Passes that are timed."""
        return MODES[self.group]

    def flops(self, mode: Mode) -> float:
        """4 B H Tq Tk D for a forward, half of it if causal, 2.5 times that for a backward."""
        base = 4.0 * self.batch * self.heads * self.queries * self.keys * self.width
        return _WORK[mode] * (base / 2 if self.causal else base)

    @property
    def scores(self) -> int:
        """B H Tq Tk, the size of the score tensor of an eager implementation."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def cache_bytes(self) -> int:
        """Bytes of k and v together."""
        size = getattr(torch, self.dtype).itemsize
        return 2 * self.batch * self.kv_heads * self.keys * self.width * int(size)

    def inputs(self, seed: int, hard: bool = False) -> list[Tensor]:
        """Normal q, k, v and output gradient [B, H, T, D], as views of [B, T, H, D].

        In the hard regime (`hard`), one ReLU weight in a thousand is positive and values have mean
        1, so that an implementation that adds large terms of both signs loses its digits.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        tensors = [
            torch.randn(
                self.batch, length, count, self.width, device=self.device, generator=generator
            )
            for length, count in (
                (self.queries, self.heads),
                (self.keys, self.kv_heads),
                (self.keys, self.kv_heads),
                (self.queries, self.heads),
            )
        ]
        if hard:
            q, k, v, _ = tensors
            # The first feature shifts every score; the others give variance (D - 1) / D.
            q[..., 0] = self.width**0.5
            k[..., 0] = _HARD_MEAN
            v += 1.0
        dtype = getattr(torch, self.dtype)
        return [tensor.to(dtype).transpose(1, 2) for tensor in tensors]


@dataclass(frozen=True)
class Plan:
    """Cases of a run and the settings of its timing."""

    cases: tuple[Case, ...]
    matmul: int
    """Side of the square matrix product that every round times as a reference."""
    rounds: int
    """Minimum number of rounds, and so of pairs behind a ratio."""
    row_seconds: float
    """Time after which no further round starts, per pass."""
    workers: int
    """Processes that compile and check kernels in parallel; 0 to do so in this process."""

    def selected(self, only: Iterable[str]) -> "Plan":
        """The plan reduced to cases whose name matches a pattern; all cases without patterns."""
        patterns = [pattern if "*" in pattern else f"*{pattern}*" for pattern in only]
        if not patterns:
            return self
        kept = [
            case
            for case in self.cases
            if any(fnmatchcase(case.name, pattern) for pattern in patterns)
        ]
        if not kept:
            names = "; ".join(case.name for case in self.cases[:3])
            raise UserError(f"only must match a case, such as {names}; got {', '.join(only)}")
        return replace(self, cases=tuple(kept))


def plan(device: str, dtypes: tuple[str, ...] = (), quick: bool = False) -> Plan:
    """The plan for a device, "cpu" or "cuda".

    With `quick` the cases are tiny: they test the benchmark and measure nothing.
    """
    cuda = device == "cuda"
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not dtypes:
        dtypes = ("bfloat16",) if cuda else ("float32",) if quick else ("float32", "bfloat16")
    cases = partial(_quick, device) if quick else _gpu if cuda else _cpu
    # A dtype that is given twice would time its cases twice.
    all_cases = tuple(case for dtype in dict.fromkeys(dtypes) for case in cases(dtype))
    if quick:
        return Plan(all_cases, matmul=64, rounds=3, row_seconds=0.0, workers=0)
    if cuda:
        return Plan(all_cases, matmul=8192, rounds=10, row_seconds=0.5, workers=8)
    return Plan(all_cases, matmul=1024, rounds=10, row_seconds=1.0, workers=0)


def _dense(device: str, dtype: str, batch: int, heads: int, n: int, width: int) -> list[Case]:
    shape = (device, dtype, batch, heads, heads, n, n, width)
    return [Case("dense", *shape, causal=causal) for causal in (False, True)]


def _gpu(dtype: str) -> list[Case]:
    """16,384 tokens of width 2048 per batch; decoding as in models with eight key/value heads."""
    gpu_cases = []
    for n in (1024, 4096, 16384):
        for width in (64, 128):
            gpu_cases += _dense("cuda", dtype, 16384 // n, 2048 // width, n, width)
    for batch, heads, kv_heads, n, width in (
        (64, 16, 16, 1024, 64),
        (1, 64, 8, 8192, 128),
        (1, 64, 8, 32768, 128),
        (8, 64, 8, 32768, 128),
    ):
        gpu_cases.append(Case("decode", "cuda", dtype, batch, heads, kv_heads, 1, n, width))
    for width in (64, 128):
        heads = 2048 // width
        gpu_cases.append(Case("features", "cuda", dtype, 4, heads, heads, 4096, 4096, width))
    return gpu_cases


def _cpu(dtype: str) -> list[Case]:
    """8 heads of width 64; short lengths with the batch size of a sentence model."""
    cpu_cases = []
    for batch, n in ((32, 32), (32, 128), (32, 512), (1, 1024), (1, 2048), (1, 4096), (1, 8192)):
        cpu_cases.append(Case("decode", "cpu", dtype, batch, 8, 8, 1, n, 64))
        cpu_cases += _dense("cpu", dtype, batch, 8, n, 64)
    # The longest cases come last, because they are skipped when time runs out.
    return [Case("features", "cpu", dtype, 1, 8, 8, 1024, 1024, 64), *cpu_cases]


def _quick(device: str, dtype: str) -> list[Case]:
    return [
        *_dense(device, dtype, 1, 8, 128, 16),
        Case("decode", device, dtype, 2, 4, 2, 1, 96, 16),
        Case("features", device, dtype, 1, 8, 8, 64, 64, 16),
    ]
