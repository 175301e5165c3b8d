"""Host time of one `relu_attention` call: checks, choice of a backend, allocation, launch.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --device cuda --length 1024 --profile 30

On the CPU the native kernel is replaced by a function that does nothing, so that the forward time
is the time from entry to the kernel's start and back. On a GPU, calls are queued without waiting
for the kernels. Both columns are for signatures that were called before, with gradients on. Times
are thread CPU times, the smallest mean of several rounds, so that other processes hardly matter.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from reluformer import relu_attention
from reluformer.model.config import AttentionConfig
from reluformer.ops.backends.cpu.native import library

ROUNDS = 40


def options(name: str, heads: int, device: str) -> dict[str, Any]:
    """Arguments of a call by its name in the table."""
    threshold = torch.full((heads,), -1.0, device=device, requires_grad=True)
    return {
        "plain": {},
        "causal": {"causal": True},
        "default of the models": {**AttentionConfig().fixed_options, "threshold": threshold},
    }[name]


def smallest(call: Callable[[], Any], calls: int, device: str) -> float:
    """Microseconds of one call: the smallest mean over the rounds."""
    times = []
    for _ in range(ROUNDS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.thread_time_ns()
        for _ in range(calls):
            call()
        times.append((time.thread_time_ns() - start) / calls / 1e3)
    return min(times)


@contextmanager
def without_kernels() -> Iterator[None]:
    """The native CPU kernels do nothing."""
    kernels = library.load()
    if kernels is None:
        raise SystemExit("build the kernels first: python -m reluformer.ops.backends.cpu.native")
    saved = kernels.forward, kernels.backward
    kernels.forward = kernels.backward = lambda *arguments: 0
    try:
        yield
    finally:
        kernels.forward, kernels.backward = saved


def measure(call: Callable[[], Tensor], calls: int, device: str) -> tuple[float, float]:
    """Microseconds of forward and backward."""
    for _ in range(20):
        call().sum().backward()
    grad = torch.ones_like(call())
    forward = smallest(call, calls, device)

    def both() -> None:
        torch.autograd.backward(call(), grad)

    return forward, smallest(both, calls, device) - forward


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--length", type=int, help="tokens of a sequence; 8 on a CPU, 1024 on a GPU"
    )
    parser.add_argument("--calls", type=int, default=50, help="calls of a round")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="print the N slowest functions"
    )
    arguments = parser.parse_args()
    device, on_gpu = arguments.device, arguments.device == "cuda"
    length = arguments.length or (1024 if on_gpu else 8)
    sizes = (16, 16, length, 64) if on_gpu else (1, 2, length, 16)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.set_num_threads(1)
    q, k, v = (torch.randn(sizes, device=device, dtype=dtype, requires_grad=True) for _ in "qkv")
    print(f"{device}, [B, H, T, D] = {list(sizes)}, {dtype}, microseconds of one call")
    print(f"{'call':24}{'forward':>10}{'backward':>10}")
    with nullcontext() if on_gpu else without_kernels():
        for name in ("plain", "causal", "default of the models"):
            given = options(name, sizes[1], device)

            def call(given: dict[str, Any] = given) -> Tensor:
                return relu_attention(q, k, v, **given)

            forward, backward = measure(call, arguments.calls, device)
            print(f"{name:24}{forward:10.1f}{backward:10.1f}", flush=True)
        if arguments.profile:
            profile = cProfile.Profile()
            with profile:
                for _ in range(1000):
                    relu_attention(q, k, v)
            pstats.Stats(profile).sort_stats("tottime").print_stats(arguments.profile)


if __name__ == "__main__":
    main()
