"""Calls of `benchmarks.sanitize`: small odd shapes that launch every kernel.

    python -m benchmarks.sanitize_calls work --share 0

One process runs one share of the calls. Every tensor has its own allocation of its exact size.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.repeat import launched_kernels
from reluformer import decode_attention
from reluformer.ops.backends.triton import op, tuning
from reluformer.ops.call import Call, Packing
from reluformer.ops.rule import Rectified
from reluformer.ops.visibility import Visibility
from tests.ops.backends.triton.portable import test_decode, test_decode_gpu
from tests.ops.rectified import CASES, Arguments, Case, arguments, found

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
"""Calls with every way of loading and storing, on the portable and the Hopper kernels."""
_WIDE128 = replace(WIDE, width=128, value_width=128)
HOPPER = [
    replace(case, power=power, threshold=(-float(power),) * 4, row_normalise=epsilon, causal=causal)
    for power, epsilon in ((1, 1.0), (2, 1e-4), (4, 1e-4), (8, 1e-4))
    for case, causal in ((WIDE, power != 4), (_WIDE128, power == 4))
]
"""Calls of each loop of the Hopper kernels: the powers, row-normalised with thresholds."""
_POWER = {"power": 4, "threshold": (-4.0,) * 4, "row_normalise": 1e-4}
_COMPACT = {"gradient_bytes": 1 << 24, "compact_gradients": True, "product_rows": 128}
REQUESTED: list[tuple[Case, dict[str, Any]]] = [
    (replace(WIDE, **_POWER), {"forward_tile": "three", "dq_tile": "three"}),
    (replace(WIDE, **_POWER), {"dkv_tile": "wide", "dq_tile": "wide"}),
    (replace(_WIDE128, **_POWER), {"forward_tile": "late"}),
    (replace(_WIDE128, **_POWER, causal=True), _COMPACT),
    (replace(WIDE, **_POWER, queries=61, keys=64), {"one_pass": True}),
]
"""Calls with options of `tuning.override` that only longer calls have by default, or no call."""
# Number of processes; compilation dominates.
SHARES = 15
Outputs = list[Tensor]


def exact(given: Arguments) -> Arguments:
    """The same call on tensors with their own allocations."""
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in given.leaves.items()}
    given.options |= {name: leaf for name, leaf in leaves.items() if name in given.options}
    return Arguments(leaves, given.options, given.cotangents)


def jobs(hopper: bool, device: str, dtype: torch.dtype) -> list[partial[Outputs]]:
    """All groups of calls; together they launch every kernel.

    Args:
        hopper: Whether the Hopper kernels run where they can.
        device: Device of the tensors.
        dtype: Their dtype.
    """
    where = (hopper, device, dtype)
    packed = [partial(_packed, width, *where) for width in (64, 128)]
    decoding = partial(_dropout_and_decoding, device, dtype)
    dense = [partial(_dense, case, *where) for case in DENSE]
    chosen = [(case, choice) for case, choice in REQUESTED if hopper or "one_pass" in choice]
    chosen += [(case, {}) for case in HOPPER if hopper]
    requested = [partial(_requested, *each, *where) for each in chosen]
    return [*packed, decoding, *dense, *requested]


def work(
    share: int, *, hopper: bool = True, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> int:
    """Run one share of the calls: dense and packed with gradients, decoding from rows and pages.

    Returns:
        The number of checked outputs.
    """
    torch.manual_seed(0)
    outputs = [each for job in jobs(hopper, device, dtype)[share::SHARES] for each in job()]
    torch.cuda.synchronize()
    assert all(bool(output.isfinite().all()) for output in outputs)
    return len(outputs)


def _dense(case: Case, hopper: bool, device: str, dtype: torch.dtype) -> Outputs:
    outputs: Outputs = []
    # Descriptors or pointers, with either memory layout; the second launch reuses the first.
    for tma in (None, False):
        given = exact(arguments(case, dtype, device, transposed=tma is None))
        for sign_bytes, gradient_bytes in ((0, 0), (1 << 20, 0), (1 << 20, 1 << 24)):
            # Hopper kernels run where they can: head widths 64 and 128, by descriptors.
            chosen = hopper and sign_bytes > 0
            with tuning.override(
                tma=tma, sign_bytes=sign_bytes, gradient_bytes=gradient_bytes, hopper=chosen
            ):
                for _ in range(2):
                    outputs += found(op.attend, given)[0]
    return outputs


def _requested(
    case: Case, choice: dict[str, Any], hopper: bool, device: str, dtype: torch.dtype
) -> Outputs:
    with tuning.override(hopper=hopper, **choice):
        return found(op.attend, exact(arguments(case, dtype, device)))[0]


def _packed(width: int, hopper: bool, device: str, dtype: torch.dtype) -> Outputs:
    outputs: Outputs = []
    ends = torch.tensor([0, 283, 283, 300, 431], device=device, dtype=torch.int32)
    packing = Packing(ends, ends, 283, 283)
    q, k, v = torch.randn(3, 440, 4, width, device=device).to(dtype).clone().unbind()
    leaves = [each.requires_grad_() for each in (q, k, v)]
    for causal, row_normalise in product((False, True), (None, 0.1)):
        with tuning.override(hopper=hopper):
            visibility = Visibility(causal=causal)
            call = Call(q, k, v, visibility, 0.1, return_sums="row_sum", packing=packing)
            output = op.attend(call, Rectified(row_normalise=row_normalise)).output
            outputs += [output, *torch.autograd.grad(output.float().square().sum(), leaves)]
    return outputs


def _dropout_and_decoding(device: str, dtype: torch.dtype) -> Outputs:
    outputs: Outputs = []
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


def main() -> None:
    """Run one task in this process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=["compile", "work", "canary"])
    parser.add_argument("--portable", action="store_true", help="portable kernels only")
    parser.add_argument("--share", type=int, default=0, help=f"number of the share, below {SHARES}")
    arguments = parser.parse_args()
    if arguments.task == "canary":
        canary_kernel[(1,)](torch.zeros(3, device="cuda"))
        torch.cuda.synchronize()
        return
    run = partial(work, arguments.share, hopper=not arguments.portable)
    # A profiler and compute-sanitizer exclude each other.
    if arguments.task == "compile":
        print(json.dumps(launched_kernels(run)))
    else:
        run()


if __name__ == "__main__":
    main()
