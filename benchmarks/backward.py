"""Variants of the backward kernels against the backward of cuDNN softmax.

    python -m benchmarks.backward --out backward.json         # on a GPU, at most 100 s
    python -m benchmarks.backward --only plain specialised --lengths 256 512 --models --out F
    TRITON_INTERPRET=1 python -m benchmarks.backward --quick  # the interpreter, one tiny shape

bf16, 16,384 tokens, width 2048, views of [B, T, H, D]. Variants that are not within 6e-3 of float64
are not timed. Times are medians over interleaved rounds and cover all kernels of a backward. Ratios
are medians of the ratios to cuDNN within a round; above 1, our kernel is faster. Variants:

    default              the choice of the package
    plain                portable kernels
    scores               portable kernels; the dQ kernel recomputes the scores
    m64, m1024           portable kernels; the dQ kernel reads the signs of the scores that the
                         dK/dV kernel stores, in chunks of 64 or 1024 MiB
    specialised          Hopper kernels, with stored signs where that is the default
    specialised, scores  Hopper kernels without stored signs
    specialised, stored  Hopper kernels; the dQ kernel reads the score gradients that the dK/dV
                         kernel stores, in chunks of 512 MiB
    q64/64/4/3, k...     portable kernels with another tile (query rows, keys, warps, stages) of the
                         dQ (q) or dK/dV (k) kernel

`--models` times the call of the document models (power 8, thresholds, row normalisation, a gradient
of the row sums) instead of the plain call.
"""

import argparse
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reluformer.bench.timing import Call as Timed
from reluformer.bench.timing import Clock, ratio
from reluformer.files import write_json
from reluformer.ops.backends.triton import run_backward, run_forward, tuning
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, DTYPE = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
PEER = SDPBackend.MATH if INTERPRETED else SDPBackend.CUDNN_ATTENTION
DEFAULT, PLAIN, SCORES, MEMORY = "default", "plain", "scores", ("m64", "m1024")
SPECIALISED = ("specialised", "specialised, scores", "specialised, stored")
TOLERANCE, EPSILON = 6e-3, 1e-4
NARROW = ("q64/64/4/3", "q128/64/8/3", "q128/128/8/3", "q64/128/4/2")
WIDE = ("q64/64/4/3", "q128/64/8/3", "q128/128/8/2")
TILES = {
    (64, False): (*NARROW, "k64/64/4/3", "k128/64/4/3"),
    (64, True): (*NARROW, "k64/64/4/3p", "k128/64/4/3p"),
    (128, False): (*WIDE, "k64/128/8/3", "k64/64/4/2"),
    (128, True): (*WIDE, "k64/128/8/3p", "k64/64/4/2p"),
}


def overridden(variant: str) -> dict[tuning.Kernel, tuning.Tile]:
    """The tile in the name of a variant, by kernel."""
    if variant in (DEFAULT, PLAIN, SCORES, *MEMORY, *SPECIALISED):
        return {}
    sizes = (int(size) for size in variant[1:].rstrip("p").split("/"))
    tile = tuning.Tile(*sizes, prescale="p" in variant)
    return {"dq" if variant[0] == "q" else "dkv": tile}


class Call(NamedTuple):
    """A problem and the gradients of its outputs."""

    problem: Problem
    grads: run_backward.Gradients


def make(
    width: int, causal: bool, n: int, models: bool, tokens: int = 16_384, total: int = 2048
) -> Call:
    """Random queries, keys, values and gradients."""
    qkv = torch.randn(3, tokens // n, n, total // width, width, device=DEVICE).to(DTYPE)
    q, k, v = qkv.transpose(2, 3)
    problem = Problem(q, k, v, NO_INPUTS, Settings(width**-0.5, n, n, causal=causal))
    grads = run_backward.Gradients(torch.randn_like(q))
    if models:
        cuts = torch.full((problem.q.shape[1],), -4.0, device=DEVICE)
        settings = problem.settings._replace(power=8, row_normalise=EPSILON)
        optional = NO_INPUTS._replace(threshold=cuts)
        problem = problem._replace(optional=optional, settings=settings)
        out, row_sum, *_ = run_forward.forward(problem, 1)
        # The loss on row sums has a small weight.
        grad_sum = 1e-3 * torch.randn_like(row_sum)
        grads = grads._replace(out=out, row_sum=row_sum, grad_sum=grad_sum)
    return Call(problem, grads)


def backward(call: Call, variant: str) -> tuple[Tensor, ...]:
    """dq, dk and dv."""
    limits = {SCORES: 0, SPECIALISED[1]: 0, **{name: int(name[1:]) << 20 for name in MEMORY}}
    gradient_bytes = {DEFAULT: None, SPECIALISED[2]: 512 << 20}.get(variant, 0)
    chosen = None if variant == DEFAULT else variant in SPECIALISED
    with tuning.override(
        overridden(variant), sign_bytes=limits.get(variant), hopper=chosen,
        gradient_bytes=gradient_bytes,
    ):  # fmt: skip
        return run_backward.backward(
            *call, needs_shift=call.problem.optional.threshold is not None
        )[:3]


def gate(job: tuple[int, bool, bool, str]) -> float:
    """Largest relative error of the gradients at an odd length; also compiles the kernels."""
    width, causal, models, variant = job
    n = 77 if INTERPRETED else 4093
    call = make(width, causal, n, models, tokens=2 * n, total=2 * width)
    problem, grads = call
    leaves = [each.double().requires_grad_() for each in problem[:3]]
    seen = torch.ones(n, n, device=DEVICE, dtype=torch.bool).tril(0 if causal else n)
    scores = leaves[0] @ leaves[1].transpose(-2, -1) * problem.settings.scale
    threshold = problem.optional.threshold
    cut = 0.0 if threshold is None else threshold.double()[:, None, None]
    weights = (scores - cut).relu() ** problem.settings.power * seen
    weights = weights / (seen.sum(-1, keepdim=True) / 2).sqrt()
    sums = weights.sum(-1)
    if problem.is_row_normalised:
        weights = weights / (sums[..., None] + EPSILON)
    total = (weights @ leaves[2] * grads.grad_out.double()).sum()
    if grads.grad_sum is not None:
        total = total + (sums * grads.grad_sum.double()).sum()
    wanted = torch.autograd.grad(total, leaves)
    try:
        pairs = zip(backward(call, variant), wanted, strict=True)
        return max(float((one.double() - other).norm() / other.norm()) for one, other in pairs)
    except Exception as error:
        print(*job, type(error).__name__, str(error)[:200], flush=True)
        return float("inf")


def measure(
    width: int, causal: bool, n: int, models: bool, variants: list[str], quick: bool
) -> list[dict[str, object]]:
    """Milliseconds of each variant at one shape, and its speed relative to the peer."""
    call = make(width, causal, n, models, **({"tokens": 128, "total": 64} if quick else {}))
    leaves = [each.detach().requires_grad_() for each in call.problem[:3]]
    with sdpa_kernel(PEER):
        out = scaled_dot_product_attention(*leaves, is_causal=causal)
    grad = call.grads.grad_out
    calls: dict[str, Timed] = {
        PEER.name: partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)
    }
    calls |= {name: partial(backward, call, name) for name in variants}
    times = Clock(DEVICE).rounds(calls, 1 if quick else 7, 0.0 if quick else 1.5)
    return [
        {
            "width": width,
            "causal": causal,
            "n": n,
            "what": name,
            "ms": statistics.median(taken),
            "ratio": ratio(taken, times[PEER.name]),
        }
        for name, taken in times.items()
    ]


def main() -> None:
    """Check all variants, time them, and print a table."""
    parser = argparse.ArgumentParser(description="Time the backward kernels.")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=90, help="time after which no shape starts"
    )
    parser.add_argument("--only", nargs="+", default=[], help="names of variants; default: all")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16_384])
    parser.add_argument("--models", action="store_true", help="the call of the document models")
    parser.add_argument("--quick", action="store_true", help="one tiny shape")
    arguments = parser.parse_args()
    start = time.monotonic()
    jobs = [
        (*kind, arguments.models, name)
        for kind, names in TILES.items()
        for name in (DEFAULT, PLAIN, SCORES, *SPECIALISED, *MEMORY, *names)
        if name in (arguments.only or [name])
    ]
    jobs = jobs[:2] if arguments.quick else jobs
    if INTERPRETED:
        errors = list(map(gate, jobs))
    else:
        # One process for each job, because compilation dominates.
        with ProcessPoolExecutor(len(jobs), mp_context=get_context("spawn")) as pool:
            errors = list(pool.map(gate, jobs))
    refused = [job for job, error in zip(jobs, errors, strict=True) if not error <= TOLERANCE]
    print(f"largest error {max(errors):.1e}, refused: {refused}, {time.monotonic() - start:.0f} s")
    print("width mask n: milliseconds (ratio to the first)")
    rows: list[dict[str, object]] = []
    for width, causal in dict.fromkeys(job[:2] for job in jobs):
        variants = [job[3] for job in jobs if job[:2] == (width, causal) and job not in refused]
        for n in (64,) if arguments.quick else arguments.lengths:
            if time.monotonic() - start > arguments.seconds:
                continue
            found = measure(width, causal, n, arguments.models, variants, arguments.quick)
            shown = (f"{row['what']} {row['ms']:.3f} ({row['ratio']:.2f})" for row in found)
            print(
                f"{width} {'causal' if causal else 'full':6} {n:5}:", *shown, sep="  ", flush=True
            )
            rows += found
    if arguments.out:
        write_json(arguments.out, rows)


if __name__ == "__main__":
    main()
