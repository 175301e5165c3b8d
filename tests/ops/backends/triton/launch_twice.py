"""Launch every kernel through Triton and then directly, on a fake driver.

The arguments of the C launcher must be the same, apart from hooks. Decoding is prepared with a
short cache and compared with a longer one. Prints, as JSON, the number of launches, those that
differ, and the number of tensor maps that were encoded in each round.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.runtime import driver

from reluformer.ops.backends.triton import launch, run_backward, run_forward, tuning
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from tests.ops.backends.triton.fake_driver import (
    HOOKS,
    FakeDriver,
    FakeLauncher,
    FakeUtils,
    without_addresses,
)

Launched = list[tuple[str, Any]]
TILE = tuning.Tile(16, 16, 1, 1, prescale=True)
CACHE = torch.zeros(2, 2, 100, 16, dtype=torch.bfloat16)


def recorded() -> Launched:
    """The launches since the last call, without addresses and hooks."""
    launches = []
    for name, args in FakeLauncher.launched:
        # A direct launch leaves these out.
        args[HOOKS] = []
        launches.append((name, without_addresses(tuple(args))))
    FakeLauncher.launched.clear()
    return launches


def decode(keys: int) -> None:
    """Decode with a cache of `keys` keys, in three variants."""
    cache = CACHE[:, :, :keys]
    optional = NO_INPUTS._replace(gamma=torch.ones(2))
    problem = Problem(cache[:, :, :1], cache, cache, optional, Settings(0.25, 1, keys))
    normalised = problem._replace(settings=problem.settings._replace(row_normalise=0.1))
    with tuning.override({"decode": tuning.Tile(16, 16, 1, 1)}):
        for statistics in (0, 1):
            run_forward.forward(problem, statistics)
        run_forward.forward(normalised, 1)


Q = torch.zeros(2, 20, 4, 16, dtype=torch.bfloat16).transpose(1, 2)
GAMMA = torch.ones(4)
LONG = torch.zeros(2, 300, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
LENGTHS = torch.tensor([300, 7])


def train() -> None:
    """Forward and backward of a causal call, with and without row normalisation."""
    settings = Settings(0.25, 20, 20, causal=True)
    kernels: tuple[tuning.Kernel, ...] = ("forward", "dkv", "dq")
    with tuning.override(dict.fromkeys(kernels, TILE), tma=True):
        for row_normalise in (0.0, 0.1):
            problem = Problem(
                Q, Q[:, :2], Q[:, 2:], NO_INPUTS._replace(gamma=GAMMA),
                settings._replace(row_normalise=row_normalise),
            )  # fmt: skip
            out, row_sum, _, _ = run_forward.forward(problem, 1)
            grads = run_backward.Gradients(torch.zeros_like(out), out)
            # Without row normalisation, the row sums have a gradient.
            name = "row_sum" if row_normalise else "grad_sum"
            run_backward.backward(problem, grads._replace(**{name: row_sum}), False)


def train_short() -> None:
    """A backward of short sequences in one kernel."""
    problem = Problem(Q, Q[:, :2], Q[:, 2:], NO_INPUTS, Settings(0.25, 20, 20, causal=True))
    with tuning.override(one_pass=True):
        run_backward.backward(problem, run_backward.Gradients(torch.zeros_like(Q)), True)


def hopper() -> None:
    """A warp-specialised forward."""
    optional = NO_INPUTS._replace(gamma=torch.ones(2), key_lengths=LENGTHS)
    problem = Problem(LONG, LONG, LONG, optional, Settings(0.125, 300, 300, causal=True))
    with tuning.override(tma=True, hopper=True):
        run_forward.forward(problem, 1)


def hopper_backward() -> None:
    """A warp-specialised backward with row normalisation, without and with score gradients."""
    settings = Settings(0.125, 300, 300, causal=True, row_normalise=0.1)
    problem = Problem(LONG, LONG, LONG, NO_INPUTS._replace(key_lengths=LENGTHS), settings)
    out, row_sum = torch.zeros_like(LONG), torch.zeros(LONG.shape[:3])
    grads = run_backward.Gradients(torch.zeros_like(out), out, row_sum=row_sum)
    for gradient_bytes in (0, 1 << 20):
        with tuning.override(tma=True, gradient_bytes=gradient_bytes, hopper=True):
            run_backward.backward(problem, grads, True)


def main() -> None:
    driver.set_active(FakeDriver())
    rounds: list[Launched] = []
    encoded = []
    for _ in range(3):
        before = FakeUtils.encoded
        train()
        train_short()
        hopper()
        hopper_backward()
        rounds.append(recorded())
        encoded.append(FakeUtils.encoded - before)
    assert all(each.direct is not None for each in launch.LAUNCHES.values())

    decode(80)
    first = recorded()
    launch.SIZED_LAUNCHES.clear()
    decode(50)
    recorded()
    decode(80)
    pairs = [*zip(rounds[0], rounds[2], strict=True), *zip(first, recorded(), strict=True)]
    assert all(each.direct is not None for each in launch.SIZED_LAUNCHES.values())

    # A hook sees every launch.
    names: list[str] = []
    triton.knobs.runtime.launch_enter_hook.add(
        lambda metadata: names.append(metadata.get()["name"])
    )
    hopper()
    different = [one for one, other in pairs if one != other]
    result = {"launches": len(pairs), "different": different, "encoded": encoded, "hooked": names}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
