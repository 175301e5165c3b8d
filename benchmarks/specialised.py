"""The forward with specialised warps against the plain kernel and cuDNN's softmax, by length.

    python benchmarks/specialised.py --out F [--seconds 60]

Four calls (plain; with row sums; the models' with powers 4 and 8: thresholds, key lengths, rows
divided) at two widths, full and causal, 16,384 tokens, interleaved rounds. For each: how much
faster the specialised kernel is, and what it costs relative to its own plain call. Where one is
slower decides `reluformer.ops.backends.triton.hopper.launch_forward.suits`. Needs a Hopper GPU.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
APART = 3e-3


def main() -> None:
    """Check, time, print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="for timing, roughly")
    arguments = parser.parse_args()
    shapes = list(itertools.product((64, 128), (False, True), LENGTHS))
    found: dict[str, Any] = {"environment": info(), "shapes": {}}
    for width, causal, n in shapes:
        name = f"d {width}, {'causal' if causal else 'full'}, n {n}"
        row = measured(width, causal, n, arguments.seconds / len(shapes))
        found["shapes"][name] = row
        arguments.out.write_text(json.dumps(found, indent=1))
        gains = ", ".join(f"{call} {ratio:.2f}" for call, ratio in row["x plain kernel"].items())
        print(f"{name}: x cuDNN {row['x cuDNN']:.2f}; x plain kernel: {gains}", flush=True)


def measured(width: int, causal: bool, n: int, seconds: float) -> dict[str, Any]:
    """Ratios of one shape, once both kernels agree."""
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
        both = [partial(ours, kind, q, k, v, causal, options) for kind in (True, False)]
        new, old = (call() for call in both)
        assert (new - old).norm() <= APART * old.norm(), (name, width, causal, n)
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


def ours(
    specialised: bool, q: Tensor, k: Tensor, v: Tensor, causal: bool, options: dict[str, Any]
) -> Tensor:
    with tuning.override(specialised=specialised), torch.no_grad():
        made = relu_attention(q, k, v, causal=causal, impl="triton", **options)
    return made if isinstance(made, Tensor) else made.output


def softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def _ratio(times: list[float], by: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, by, strict=True))


if __name__ == "__main__":
    main()
