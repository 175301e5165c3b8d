"""Agreement of all backends with float64 over random configurations.

    python -m benchmarks.agreement --cases 5000
    python -m benchmarks.agreement --device cuda --cases 500 --processes 15 --out agreement.json

A third of the cases hold NaN or infinity in a key and its value; rows that see the key are left
out. The table gives the worst errors of the output, of the gradients of q, k and v, and of those of
learned numbers, relative to the largest exact number of a tensor.
On a GPU the cases are drawn from a limited number of compiled variants, and one process compiles
and runs all cases of a variant.
"""

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reluformer import relu_attention
from reluformer.info import info
from reluformer.ops.backends.cpu.native import library
from reluformer.ops.backends.triton import op
from reluformer.ops.visibility import Visibility

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "float16": torch.float16,
}
WAYS = {
    "reference": "reference",
    "native": "cpu",
    "torch": "cpu",
    "portable": "triton",
    "Hopper": "triton",
}
"""Backend by column of the table; "native" and "torch" are the two paths of impl="cpu"."""
CPU_WAYS, GPU_WAYS = ("reference", "native", "torch"), ("reference", "portable", "Hopper")
_FIRST_VARIANT, VARIANTS = 4060, 90
"""Compiled variants of the cases for a GPU, and a seed with which all dtypes and powers occur."""
# Keys of a variant: one tile of the tables in `tuning`, and lengths that no tile divides.
_LENGTHS = ((33, 64), (129, 256), (257, 512), (513, 1500))

ERRORS = ("output", "gradients", "learned")
"""Output; gradients of q, k and v; gradients of threshold and gamma, whose terms may cancel."""
Errors = tuple[float, float, float]


@dataclass(frozen=True)
class Case:
    """One random call."""

    seed: int
    dtype: str
    shape: tuple[int, int, int, int, int, int, int]
    """Batch, key heads, query heads per key head, Tq, Tk, D, Dv."""
    options: dict[str, Any]
    visibility: Visibility
    hiding: Visibility
    """The part of the visibility that hides non-finite numbers."""
    bad_key: int | None
    """Position of a key with non-finite numbers."""
    is_learned: bool
    """Whether gamma and threshold are tensors with gradients."""

    @property
    def power(self) -> int:
        return int(self.options["power"])

    def ways(self, device: str) -> list[str]:
        """The columns of the table that this case belongs to."""
        if device == "cpu":
            return list(CPU_WAYS)
        rules, (*_, rows, _, width, value_width) = self.visibility, self.shape
        can_run_hopper = (
            self.dtype == "bfloat16"
            and width == value_width
            and width in (64, 128)
            and rules.mask is rules.window is None
            and rows > 16
        )
        return list(GPU_WAYS) if can_run_hopper else ["reference", "portable"]


def random_case(seed: int) -> Case:
    """The CPU case of a seed."""
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
    options = _random_options(draw)
    bad = draw.randrange(keys) if draw.random() < 1 / 3 else None
    rules = Visibility(mask, draw.random() < 0.4, lengths, window)
    dtype = draw.choice(["float32", "bfloat16", "float64"])
    return Case(seed, dtype, shape, options, rules, rules, bad, is_learned=seed % 2 == 1)


def _random_options(draw: random.Random) -> dict[str, Any]:
    return {
        "power": draw.choice([1, 2, 4, 8]),
        "gamma": draw.choice([1.0, 0.3, 3.0]),
        "threshold": draw.choice([0.0, -1.0, 0.2]),
        "length_exponent": draw.choice([0.5, 1.0, 0.0]),
        "row_normalise": draw.choice([None, None, 0.1]),
    }


def random_gpu_case(seed: int, longest: int = _LENGTHS[-1][1]) -> Case:
    """The GPU case of a seed: compile-time choices follow from the variant, seed % VARIANTS."""
    variant, draw = random.Random(_FIRST_VARIANT + seed % VARIANTS), random.Random(seed)
    source = torch.Generator().manual_seed(seed)
    dtype = variant.choice(["bfloat16"] * 5 + ["float16", "float32"])
    width = variant.choice([64, 128] * 5 + [w for w in op.WIDTHS if w not in (64, 128)])
    value_width = variant.choice([width] * 9 + [64])
    first, last = variant.choice(_LENGTHS)
    keys = min(draw.randint(first, last), longest)
    rows = variant.choice([keys, keys, draw.randint(max(17, keys // 2), 2 * keys)])
    if variant.random() < 0.15:
        # Decoding.
        rows = variant.choice([1, 5])
    batch, groups = draw.randint(1, 3), variant.choice([1, 1, 1, 2, 3])
    shape = (batch, draw.randint(1, 3), groups, rows, keys, width, value_width)
    options = {**_random_options(draw), **_random_options(variant)}
    if dtype == "float16":
        options["power"] = variant.choice([1, 2])
    mask = lengths = window = None
    if variant.random() < 0.1:
        mask = torch.rand(batch, 1, rows, keys, generator=source) < 0.7
    has_lengths, causal = variant.random() < 0.5, variant.random() < 0.4
    if has_lengths:
        lengths = torch.randint(0, keys + 1, (batch,), generator=source)
    if variant.random() < 0.1:
        window = draw.randint(1, keys)
    # The fused kernels promise no effect only for keys behind the key lengths.
    bad = keys - draw.randint(1, keys // 4) if has_lengths and draw.random() < 2 / 3 else None
    return Case(
        seed, dtype, shape, options, Visibility(mask, causal, lengths, window),
        Visibility(key_lengths=lengths), bad, is_learned=variant.random() < 0.5,
    )  # fmt: skip


@contextmanager
def path(way: str) -> Iterator[None]:
    """Context in which the backend of a column takes the path of that column."""
    if WAYS[way] == "triton":
        # Only now: it imports Triton.
        from reluformer.ops.backends.triton import tuning

        with tuning.override(hopper=way == "Hopper"):
            yield
        return
    saved = library.load
    if way == "torch":
        library.load = lambda: None  # type: ignore[assignment]
    try:
        yield
    finally:
        library.load = saved


def run(case: Case, impl: str, dtype: torch.dtype, fill: float, device: str) -> list[Tensor]:
    """Output and gradients that `bad_key` must not change."""
    source = torch.Generator().manual_seed(case.seed)
    batch, kv_heads, groups, rows, keys, width, value_width = case.shape
    sizes = [(kv_heads * groups, rows, width), (kv_heads, keys, width),
             (kv_heads, keys, value_width), (kv_heads * groups, rows, value_width)]  # fmt: skip
    storage = DTYPES[case.dtype]
    q, k, v, grad = (
        torch.randn(batch, *size, generator=source).to(storage).to(dtype) for size in sizes
    )
    blind = torch.ones(batch, rows, dtype=torch.bool)
    if case.bad_key is not None:
        k[:, :, case.bad_key, ::2] = fill
        v[:, :, case.bad_key, 1::2] = fill
        seen = case.hiding.table(rows, keys, q.device)
        assert seen is not None or case.hiding is case.visibility
        everything = torch.ones(batch, 1, rows, keys, dtype=torch.bool)
        blind = ~(everything if seen is None else everything & seen)[:, 0, :, case.bad_key]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    options, learned = dict(case.options), {}
    if case.is_learned:
        for name in ("threshold", "gamma"):
            value = torch.full((q.shape[1],), options[name], dtype=wide, device=device)
            learned[name] = value.requires_grad_()
    q, k, v, grad, blind = (t.to(device) for t in (q, k, v, grad, blind))
    leaves = [t.requires_grad_() for t in (q, k, v)] + list(learned.values())
    rules = case.visibility
    output = relu_attention(
        q, k, v, mask=_to(rules.mask, device), causal=rules.causal,
        key_lengths=_to(rules.key_lengths, device), window=rules.window, impl=impl,
        **{**options, **learned},
    )  # fmt: skip
    gradients = torch.autograd.grad(output, leaves, grad * blind[:, None, :, None])
    results = [output.transpose(1, 2)[blind], gradients[0].transpose(1, 2)[blind]]
    whole = blind.all(dim=1)
    results += [gradient[whole] for gradient in gradients[1:3]]
    # A row that sees the key may spoil the gradients of all keys and of the learned numbers.
    return [t.detach().double() for t in (*results, *(gradients[3:] if blind.all() else ()))]


def _to(tensor: Tensor | None, device: str) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def worst_error(case: Case, way: str, device: str = "cpu") -> Errors:
    """Largest errors, see `ERRORS`."""
    exact = run(case, "reference", torch.float64, 0.0, device)
    fill = (torch.nan, torch.inf, -torch.inf)[case.seed % 3]
    with path(way):
        results = run(case, WAYS[way], DTYPES[case.dtype], fill, device)
    errors = [_error(one, other) for one, other in zip(results, exact, strict=True)]
    return errors[0], max(errors[1:4]), max(errors[4:], default=0.0)


def _error(result: Tensor, exact: Tensor) -> float:
    if not exact.numel():
        return 0.0
    error = ((result - exact).abs().max() / exact.abs().max().clamp_min(1e-3)).item()
    return error if error == error else float("inf")


Result = tuple[Case, dict[str, Errors | str]]
"""A case with the errors of each way, or the message of an exception."""


def results_of(job: tuple[str, list[int]]) -> list[Result]:
    """The results of the cases of some seeds on a device."""
    device, seeds = job
    torch.set_num_threads(1)
    make: Callable[[int], Case] = random_case if device == "cpu" else random_gpu_case
    results: list[Result] = []
    for case in map(make, seeds):
        errors: dict[str, Errors | str] = {}
        for way in case.ways(device):
            try:
                errors[way] = worst_error(case, way, device)
            except Exception as failure:
                # One kernel that does not compile must not hide the results of the others.
                errors[way] = f"{type(failure).__name__}: {failure}"[:400]
        results.append((case, errors))
    return results


def summary(results: Iterable[Result]) -> dict[str, Any]:
    """Worst errors by dtype, power and way, the number of cases, and failures."""
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    failures: list[str] = []
    worst: list[dict[str, Any]] = []
    for case, errors in results:
        for way, error in errors.items():
            if isinstance(error, str):
                failures.append(f"seed {case.seed}, {way}: {error}")
                continue
            key = (case.dtype, case.power, way)
            new = dict(zip(("dtype", "power", "way"), key, strict=True))
            row = rows.setdefault(key, {**new, "cases": 0, **dict.fromkeys(ERRORS, 0.0)})
            row["cases"] += 1
            row |= {name: max(row[name], e) for name, e in zip(ERRORS, error, strict=True)}
            worst.append({"seed": case.seed, "way": way, "errors": error, "dtype": case.dtype})
    worst.sort(key=lambda entry: -max(entry["errors"]))
    return {"rows": [rows[key] for key in sorted(rows)], "failures": failures, "worst": worst[:20]}


def table(rows: list[dict[str, Any]], ways: Iterable[str]) -> str:
    """The rows as Markdown, one line for each dtype and power."""
    ways = list(ways)
    lines = [
        "| dtype | power | " + " | ".join(f"{way}: cases | {' | '.join(ERRORS)}" for way in ways),
        "|---" * (2 + 4 * len(ways)),
    ]
    by_key = {(row["dtype"], row["power"], row["way"]): row for row in rows}
    for dtype, power in sorted({key[:2] for key in by_key}):
        cells: list[str] = []
        for way in ways:
            row = by_key.get((dtype, power, way))
            cells.append("-" if row is None else str(row["cases"]))
            cells += ["-" if row is None else f"{row[name]:.1e}" for name in ERRORS]
        lines.append(f"| {dtype} | {power} | " + " | ".join(cells))
    return "\n".join(line + " |" for line in lines)


def run_jobs(jobs: list[tuple[str, list[int]]], processes: int, limit: float) -> list[Result]:
    """All results, or those that are there after `limit` seconds."""
    end, results = time.monotonic() + limit, []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pending = pool.imap_unordered(results_of, jobs)
        for done in range(len(jobs)):
            try:
                results += pending.next(max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                print(f"stopped after {limit:.0f} s: {done} of {len(jobs)} jobs")
                break
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after this time")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cpu" and library.load() is None:
        raise SystemExit("build the kernels first: python -m reluformer.ops.backends.cpu.native")
    seeds = range(arguments.start, arguments.start + arguments.cases)
    jobs = [(device, list(seeds[i::VARIANTS])) for i in range(min(VARIANTS, len(seeds)))]
    begin = time.monotonic()
    results = run_jobs(jobs, arguments.processes, arguments.seconds)
    found = {"device": device, "torch": torch.__version__, "cases": len(results)}
    if device == "cuda":
        import triton

        found |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    else:
        found |= {"device": ", ".join(info()["devices"]), "kernels": library.summary()}
    found |= {"seconds": round(time.monotonic() - begin, 1), **summary(results)}
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found["rows"], CPU_WAYS if device == "cpu" else GPU_WAYS))
    print(f"{len(results)} cases, {found['seconds']} s")
    if found["failures"]:
        raise SystemExit("\n".join(found["failures"][:20]))


if __name__ == "__main__":
    main()
