"""What is measured: the shapes, their inputs, and how much work they are."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
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

# Multiples of the forward's matrix products: a backward needs five for the forward's two.
_WORK: dict[Mode, float] = {"forward": 1.0, "backward": 2.5, "both": 3.5, "decode": 1.0}

# In the hard regime scores are normal around this: one in a thousand is positive.
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
        """What `--only` matches and tables show."""
        mask = "causal" if self.causal else "full"
        what = {"dense": mask, "decode": "decode", "features": f"features, {mask}"}[self.group]
        heads = f"{self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else f"{self.heads}"
        size = f"batch {self.batch}, heads {heads}"
        return f"{self.dtype}, d {self.width}, {what}, n {self.keys}, {size}"

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Which passes are timed."""
        return MODES[self.group]

    def flops(self, mode: Mode) -> float:
        """4 B H Tq Tk D for a forward, half of it if causal, 2.5 times that for a backward."""
        base = 4.0 * self.batch * self.heads * self.queries * self.keys * self.width
        return _WORK[mode] * (base / 2 if self.causal else base)

    @property
    def scores(self) -> int:
        """B H Tq Tk, what an eager implementation holds several times."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def cache_bytes(self) -> int:
        """Bytes of k and v."""
        size = getattr(torch, self.dtype).itemsize
        return 2 * self.batch * self.kv_heads * self.keys * self.width * int(size)

    def inputs(self, seed: int, hard: bool = False) -> list[Tensor]:
        """q, k, v and an output gradient, views of [B, T, H, D] as a model makes them.

        Normal numbers; with `hard` one weight of ReLU attention in a thousand is above zero and
        values have mean 1, where sums of many terms of either sign would cancel.
        """
        source = torch.Generator(self.device).manual_seed(seed)
        made = [
            torch.randn(self.batch, length, count, self.width, device=self.device, generator=source)
            for length, count in (
                (self.queries, self.heads),
                (self.keys, self.kv_heads),
                (self.keys, self.kv_heads),
                (self.queries, self.heads),
            )
        ]
        if hard:
            q, k, v, _ = made
            # One feature shifts every score; the others still give them variance (D - 1) / D.
            q[..., 0] = self.width**0.5
            k[..., 0] = _HARD_MEAN
            v += 1.0
        dtype = getattr(torch, self.dtype)
        return [tensor.to(dtype).transpose(1, 2) for tensor in made]


@dataclass(frozen=True)
class Plan:
    """A run: its cases, and how they are timed."""

    cases: tuple[Case, ...]
    matmul: int
    """Side of the square matrix product that is timed in the same rounds."""
    rounds: int
    """Least number of rounds, so of pairs behind a ratio."""
    row_seconds: float
    """Rounds go on until this much time is spent."""
    workers: int
    """Processes that compile and check kernels in parallel; 0 for none."""

    def selected(self, only: Iterable[str]) -> "Plan":
        """The plan with the cases whose name matches one of the patterns; all if there is none."""
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
            raise UserError(f"only is {', '.join(only)}, which matches no case, such as {names}")
        return replace(self, cases=tuple(kept))


def plan(device: str, dtypes: tuple[str, ...] = (), quick: bool = False) -> Plan:
    """The cases for a device, "cpu" or "cuda"; `quick` ones take seconds and say nothing."""
    cuda = device == "cuda"
    dtypes = dtypes or (("bfloat16",) if cuda else ("float32", "bfloat16"))
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if quick:
        small = Plan((), matmul=64, rounds=3, row_seconds=0.0, workers=0)
        return replace(small, cases=tuple(_quick(device, dtypes[0])))
    cases = _gpu if cuda else _cpu
    every = tuple(case for dtype in dtypes for case in cases(dtype))
    if cuda:
        return Plan(every, matmul=8192, rounds=10, row_seconds=0.5, workers=8)
    return Plan(every, matmul=1024, rounds=10, row_seconds=1.0, workers=0)


def _dense(device: str, dtype: str, batch: int, heads: int, n: int, width: int) -> list[Case]:
    shape = (device, dtype, batch, heads, heads, n, n, width)
    return [Case("dense", *shape, causal=causal) for causal in (False, True)]


def _gpu(dtype: str) -> list[Case]:
    """16,384 tokens of width 2048 a batch; decoding as in models with eight key heads."""
    found = []
    for n in (1024, 4096, 16384):
        for width in (64, 128):
            found += _dense("cuda", dtype, 16384 // n, 2048 // width, n, width)
    for batch, heads, kv_heads, n, width in (
        (64, 16, 16, 1024, 64),
        (1, 64, 8, 8192, 128),
        (1, 64, 8, 32768, 128),
        (8, 64, 8, 32768, 128),
    ):
        found.append(Case("decode", "cuda", dtype, batch, heads, kv_heads, 1, n, width))
    for width in (64, 128):
        heads = 2048 // width
        found.append(Case("features", "cuda", dtype, 4, heads, heads, 4096, 4096, width))
    return found


def _cpu(dtype: str) -> list[Case]:
    """8 heads of width 64; the short ones with the batch of a sentence model."""
    found = []
    for batch, n in ((32, 32), (32, 128), (32, 512), (1, 1024), (1, 2048), (1, 4096), (1, 8192)):
        found.append(Case("decode", "cpu", dtype, batch, 8, 8, 1, n, 64))
        found += _dense("cpu", dtype, batch, 8, n, 64)
    # The longest last: they are what falls away when time is short.
    return [Case("features", "cpu", dtype, 1, 8, 8, 1024, 1024, 64), *found]


def _quick(device: str, dtype: str) -> list[Case]:
    return [
        *_dense(device, dtype, 1, 8, 128, 16),
        Case("decode", device, dtype, 2, 4, 2, 1, 96, 16),
        Case("features", device, dtype, 1, 8, 8, 64, 64, 16),
    ]
