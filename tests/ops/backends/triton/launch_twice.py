"""Launch on a driver that only writes down its arguments: first through Triton, then prepared.

Decoding is prepared on fewer keys than it is compared on.

Prints, as JSON, how many launches there were and which differ.
"""

import json
import os
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from reluformer.ops.backends.triton import launch, run_backward, run_forward, tuning

written: list[list[str]] = []


def _text(value: Any) -> str:
    """What of an argument must not change: for a tensor everything but the address."""
    if isinstance(value, Tensor):
        return str((value.dtype, value.shape, value.stride()))
    if hasattr(value, "base"):
        return str((_text(value.base), value.shape, value.strides, value.padding))
    # Triton makes a new object per launch for its hooks.
    return type(value).__name__ if " object at " in str(value) else str(value)


class Writer:
    """Stands for the compiled launcher; gets exactly what `CompiledKernel.run` gets."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = src.name

    def __call__(self, *args: Any) -> None:
        written.append([self.name, *(_text(each) for each in args)])


class Utils:
    """A device that loads every binary."""

    def load_binary(self, *args: Any) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class Hopper:
    """As much of a driver as a launch asks for."""

    utils = Utils()
    launcher_cls = Writer

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7


def decoded(keys: int) -> list[list[str]]:
    """What decoding with a cache of so many keys launches."""
    written.clear()
    cache = torch.zeros(2, 2, 100, 16, dtype=torch.bfloat16)[:, :, :keys]
    problem = run_forward.Problem(
        cache[:, :, :1], cache, cache, torch.ones(2), None, None, None, None, None, None,
        0.25, 1.0, 0.0, 0.5, 1, False, 0, 0.0, 1, keys,
    )  # fmt: skip
    with tuning.override({"decode": tuning.Tile(16, 16, 1, 1)}):
        for statistics in (0, 1):
            run_forward.forward(problem, statistics)
        run_forward.forward(problem._replace(row_normalise=0.1), 1)
    return [*written]


def specialised() -> list[list[str]]:
    """What a forward with specialised warps launches."""
    written.clear()
    q = torch.zeros(2, 300, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    problem = run_forward.Problem(
        q, q, q, torch.ones(2), None, torch.tensor([300, 7]), None, None, None, None,
        0.125, 1.0, 0.0, 0.5, 1, True, 0, 0.0, 300, 300,
    )  # fmt: skip
    with tuning.override(tma=True, specialised=True):
        run_forward.forward(problem, 1)
    return [*written]


def main() -> None:
    driver.set_active(Hopper())
    tile = tuning.Tile(16, 16, 1, 1, prescale=True)
    q = torch.zeros(2, 20, 4, 16, dtype=torch.bfloat16).transpose(1, 2)
    gamma = torch.ones(4)
    problem = run_forward.Problem(
        q, q[:, :2], q[:, 2:], gamma, None, None, None, None, None, None,
        0.25, 1.0, 0.0, 0.5, 1, True, 0, 0.0, 20, 20,
    )  # fmt: skip
    rounds = []
    kernels: tuple[tuning.Kernel, ...] = ("forward", "keys", "queries")
    with tuning.override(dict.fromkeys(kernels, tile), tma=True):
        for _ in range(2):
            written.clear()
            for each in (problem, problem._replace(row_normalise=0.1)):
                out, row_sum, _, _ = run_forward.forward(each, 1)
                grads = run_backward.Gradients(out, None, torch.zeros_like(out), row_sum, None)
                if each.divided:
                    # Nothing arrives at the sums themselves.
                    grads = grads._replace(grad_sum=None, row_sum=row_sum)
                run_backward.backward(each, grads, False)
            rounds.append([*written])
    rounds[0] += specialised()
    rounds[1] += specialised()
    rounds[0] += decoded(80)
    launch.LAUNCHES.clear()
    decoded(50)
    rounds[1] += decoded(80)
    assert all(each.compiled is not None for each in launch.LAUNCHES.values())
    different = [one for one, other in zip(*rounds, strict=True) if one != other]
    print(json.dumps({"launches": len(rounds[0]), "different": different}))


if __name__ == "__main__":
    main()
