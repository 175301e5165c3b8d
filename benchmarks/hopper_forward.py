"""The warp-specialised Hopper forward against the portable kernel and cuDNN softmax, by length.

    python -m benchmarks.hopper_forward --out F [--seconds 60]

Four calls at two head widths, full and causal, 16,384 tokens, in interleaved rounds: plain; with
row sums; the calls of models with powers 4 and 8 (thresholds, key lengths, row normalisation).
For each call: the speed of the Hopper kernel relative to the portable one, and its time relative
to its own plain call. `reluformer.ops.backends.triton.hopper.launch_forward` chooses by these
ratios. Needs a Hopper GPU.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reluformer import relu_attention
from reluformer.bench.timing import Clock
from reluformer.info import info
from reluformer.ops.backends.triton import tuning

TOKENS, WIDTH = 16384, 2048
LENGTHS = (256, 512, 1024, 4096)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "row sums": {"return_sums": "row_sum"},
    "power 4": {"power": 4, "threshold": -4.0, "row_normalise": 1e-4, "return_sums": "row_sum"},
    "power 8": {"power": 8, "threshold": -8.0, "row_normalise": 1e-4, "return_sums": "row_sum"},
}
TOLERANCE = 3e-3


def main() -> None:
    """Check and time all shapes, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="approximate time for the measurements"
    )
    arguments = parser.parse_args()
    shapes = list(itertools.product((64, 128), (False, True), LENGTHS))
    report: dict[str, Any] = {"environment": info(), "shapes": {}}
    for width, causal, n in shapes:
        name = f"d {width}, {'causal' if causal else 'full'}, n {n}"
        row = measure(width, causal, n, arguments.seconds / len(shapes))
        report["shapes"][name] = row
        arguments.out.write_text(json.dumps(report, indent=1))
        gains = ", ".join(f"{call} {ratio:.2f}" for call, ratio in row["x plain kernel"].items())
        print(f"{name}: x cuDNN {row['x cuDNN']:.2f}; x plain kernel: {gains}", flush=True)


def measure(width: int, causal: bool, n: int, seconds: float) -> dict[str, Any]:
    """Ratios of one shape, after a check that both kernels agree."""
    heads, batch = WIDTH // width, TOKENS // n
    q, k, v = (
        torch.randn(batch, n, heads, width, device="cuda").bfloat16().transpose(1, 2)
        for _ in range(3)
    )
    lengths = torch.full((batch,), n, device="cuda")
    calls: dict[str, Callable[[], Any]] = {"cuDNN": partial(softmax, q, k, v, causal)}
    for name, options in CALLS.items():
        if "power" in options:
            threshold = torch.full((heads,), options["threshold"], device="cuda")
            options = {**options, "threshold": threshold, "key_lengths": lengths}
        both = [partial(relu, kind, q, k, v, causal, options) for kind in (True, False)]
        hopper, portable = (call() for call in both)
        assert (hopper - portable).norm() <= TOLERANCE * portable.norm(), (name, width, causal, n)
        calls[f"{name}, specialised"], calls[f"{name}, plain kernel"] = both
    times = Clock("cuda").rounds(calls, least=10, seconds=seconds)
    special = {name: times[f"{name}, specialised"] for name in CALLS}
    return {
        "x cuDNN": _ratio(times["cuDNN"], special["plain"]),
        "x plain kernel": {
            name: _ratio(times[f"{name}, plain kernel"], special[name]) for name in CALLS
        },
        "x plain call": {name: _ratio(special[name], special["plain"]) for name in CALLS},
    }


def relu(
    hopper: bool, q: Tensor, k: Tensor, v: Tensor, causal: bool, options: dict[str, Any]
) -> Tensor:
    """ReLU attention by the Hopper or the portable kernel, [B, H, n, D]."""
    with tuning.override(hopper=hopper), torch.no_grad():
        result = relu_attention(q, k, v, causal=causal, impl="triton", **options)
    return result if isinstance(result, Tensor) else result.output


def softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax attention by cuDNN."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def _ratio(times: list[float], by: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, by, strict=True))


if __name__ == "__main__":
    main()
