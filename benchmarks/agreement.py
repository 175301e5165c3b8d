"""Agreement of the CPU backends with float64 over random configurations.

    python -m benchmarks.agreement --cases 5000

A third of the cases hold NaN or infinity in a key and its value; rows that see the key are left
out. The table gives the worst errors of output and gradients, relative to the largest exact number.
"""

import argparse
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reluformer import relu_attention
from reluformer.ops.backends.cpu.native import library
from reluformer.ops.visibility import Visibility

WAYS = {"reference": "reference", "native": "cpu", "torch": "cpu"}
"""Backend by column of the table; "native" and "torch" are the two paths of impl="cpu"."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Case:
    """One random call."""

    seed: int
    dtype: str
    shape: tuple[int, int, int, int, int, int, int]
    """Batch, key heads, query heads per key head, Tq, Tk, D, Dv."""
    options: dict[str, Any]
    visibility: Visibility
    bad_key: int | None
    """Position of a key with non-finite numbers."""

    @property
    def power(self) -> int:
        return int(self.options["power"])


def random_case(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    source = torch.Generator().manual_seed(seed)
    batch, rows, keys = draw.randint(1, 3), draw.choice([1, 2, 9, 33, 70]), draw.randint(1, 90)
    shape = (batch, draw.randint(1, 2), draw.randint(1, 3), rows, keys,
             draw.randint(1, 40), draw.randint(1, 40))  # fmt: skip
    mask = lengths = None
    if draw.random() < 0.25:
        mask = torch.rand(batch, 1, rows, keys, generator=source) < 0.7
    if draw.random() < 0.3:
        lengths = torch.randint(0, keys + 1, (batch,), generator=source)
    window = draw.randint(1, keys) if draw.random() < 0.3 else None
    options = {
        "power": draw.choice([1, 2, 4, 8]),
        "gamma": draw.choice([1.0, 0.3, 3.0]),
        "threshold": draw.choice([0.0, -1.0, 0.2]),
        "length_exponent": draw.choice([0.5, 1.0, 0.0]),
        "row_normalise": draw.choice([None, None, 0.1]),
    }
    bad = draw.randrange(keys) if draw.random() < 1 / 3 else None
    visibility = Visibility(mask, draw.random() < 0.4, lengths, window)
    return Case(seed, draw.choice(list(DTYPES)), shape, options, visibility, bad)


@contextmanager
def path(way: str) -> Iterator[None]:
    """Context in which impl="cpu" takes the native kernels, or plain torch."""
    saved = library.load
    if way == "torch":
        library.load = lambda: None  # type: ignore[assignment]
    try:
        yield
    finally:
        library.load = saved


def run(case: Case, impl: str, dtype: torch.dtype, fill: float) -> list[Tensor]:
    """Output and gradients that `bad_key` must not change; half of the cases learn the rule."""
    source = torch.Generator().manual_seed(case.seed)
    batch, kv_heads, groups, rows, keys, width, value_width = case.shape
    sizes = [(kv_heads * groups, rows, width), (kv_heads, keys, width),
             (kv_heads, keys, value_width), (kv_heads * groups, rows, value_width)]  # fmt: skip
    storage = DTYPES[case.dtype]
    q, k, v, grad = (
        torch.randn(batch, *size, generator=source).to(storage).to(dtype) for size in sizes
    )
    rules = case.visibility
    table = rules.table(rows, keys, q.device)
    seen = torch.ones(batch, 1, rows, keys, dtype=torch.bool) if table is None else table
    seen = seen.expand(batch, 1, rows, keys)
    blind = torch.ones(batch, rows, dtype=torch.bool)
    if case.bad_key is not None:
        k[:, :, case.bad_key, ::2] = fill
        v[:, :, case.bad_key, 1::2] = fill
        blind = ~seen[:, 0, :, case.bad_key]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    options, learned = dict(case.options), {}
    if case.seed % 2:
        for name in ("threshold", "gamma"):
            value = torch.full((q.shape[1],), options[name], dtype=wide)
            learned[name] = value.requires_grad_()
    leaves = [t.requires_grad_() for t in (q, k, v)] + list(learned.values())
    output = relu_attention(
        q, k, v, mask=rules.mask, causal=rules.causal, key_lengths=rules.key_lengths,
        window=rules.window, impl=impl, **{**options, **learned},
    )  # fmt: skip
    gradients = torch.autograd.grad(output, leaves, grad * blind[:, None, :, None])
    results = [output.transpose(1, 2)[blind], gradients[0].transpose(1, 2)[blind]]
    whole = blind.all(dim=1)
    results += [gradient[whole] for gradient in gradients[1:3]]
    # A row that sees the key may spoil the gradients of all keys and of the learned numbers.
    return [t.detach().double() for t in (*results, *(gradients[3:] if blind.all() else ()))]


def worst_error(case: Case, way: str) -> tuple[float, float]:
    """Largest error of the output and of the gradients."""
    exact = run(case, "reference", torch.float64, 0.0)
    fill = (torch.nan, torch.inf, -torch.inf)[case.seed % 3]
    with path(way):
        found = run(case, WAYS[way], DTYPES[case.dtype], fill)
    errors = [_error(one, other) for one, other in zip(found, exact, strict=True)]
    return errors[0], max(errors[1:])


def _error(found: Tensor, exact: Tensor) -> float:
    if not exact.numel():
        return 0.0
    error = ((found - exact).abs().max() / exact.abs().max().clamp_min(1e-3)).item()
    return error if error == error else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--start", type=int, default=0, help="first seed")
    arguments = parser.parse_args()
    if library.load() is None:
        raise SystemExit("build the kernels first: python -m reluformer.ops.backends.cpu.native")
    worst: dict[tuple[str, int, str], tuple[float, float]] = {}
    counts: dict[tuple[str, int], int] = {}
    for seed in range(arguments.start, arguments.start + arguments.cases):
        case = random_case(seed)
        counts[case.dtype, case.power] = counts.get((case.dtype, case.power), 0) + 1
        for way in WAYS:
            key = (case.dtype, case.power, way)
            error, old = worst_error(case, way), worst.get(key, (0.0, 0.0))
            worst[key] = (max(error[0], old[0]), max(error[1], old[1]))
    print(
        "| dtype | power | cases | " + " | ".join(f"{w}: output | gradients" for w in WAYS) + " |"
    )
    print("| --- " * (3 + 2 * len(WAYS)) + "|")
    for dtype, power in sorted(counts):
        cells = [f"{e:.1e}" for way in WAYS for e in worst[dtype, power, way]]
        print(f"| {dtype} | {power} | {counts[dtype, power]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
