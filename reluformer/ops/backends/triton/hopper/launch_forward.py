"""Host side of the specialised forward: which calls it serves, and how it is launched."""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from reluformer.ops.backends.triton import tuning
from reluformer.ops.backends.triton.descriptors import View, use_descriptors
from reluformer.ops.backends.triton.launch import Launch, processors
from reluformer.ops.backends.triton.plan import is_interpreting, tile_config
from reluformer.ops.backends.triton.problem import Problem
from reluformer.ops.backends.triton.run_packed import (
    MAX_SEQUENCES,
    WorkListSize,
    work_list,
    work_list_size,
)

# Gluon is young: only versions on which the tests have run on a GPU.
_TESTED = triton.__version__.startswith("3.6.")
# So many queries and keys it takes to pay, and of causal calls; of width 64 with powers, for which
# two groups of warps have few instructions to spare.
_FROM, _CAUSAL_FROM, _POWERS_FROM = 256, 512, 2048


class Tile(NamedTuple):
    """Rows of each consumer, keys of a tile, buffers for keys and for values, and whether queries
    are held in registers or in shared memory."""

    rows: int
    keys: int
    stages: int
    q_registers: bool


TILES = {64: Tile(128, 64, 4, False), 128: Tile(64, 64, 4, True)}
"""By width of a head (benchmarks/tiles.py does not search these)."""


class SpecialisedLaunch(Launch):
    """A launch of a kernel with specialised warps."""

    def describe(self, tensor: Tensor | None, shape: View) -> Any:
        """The descriptor that Gluon's kernels take."""
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
        return TensorDescriptor(tensor, *shape, layout)


class _ForwardLaunch(SpecialisedLaunch):
    """One that is called like a launch of the plain forward kernel."""

    room = WorkListSize(0, 0)
    """Of the list of work on packed sequences."""

    def __call__(self, *tensors: Any) -> None:
        q, k, v, out, row_sum, log_sum, _count, optional = tensors
        gamma, threshold, lengths, _mask, cu_q, cu_k, _seed = optional
        rest = work = None
        if cu_q is not None and cu_k is not None:
            rows, paired = 2 * self.options["ROWS"], self.options["CAUSAL"]
            rest, work = out, work_list(cu_q, cu_k, self.room, rows, paired=paired)
        super().__call__(q, k, v, out, rest, row_sum, log_sum, gamma, threshold, lengths, work)


def suits(problem: Problem, statistics: int, out: Tensor) -> bool:
    """Whether the specialised kernel serves the call, and pays."""
    forced = tuning.current().specialised
    if forced is False or any(name == "forward" for name, _ in tuning.current().tiles):
        return False
    if problem.is_packed and (statistics > 1 or problem.sequences > MAX_SEQUENCES):
        return False
    if not serves(problem, TILES, (problem.q, problem.k, problem.v, out)):
        return False
    if forced:
        return True
    if not at_home(out):
        return False
    width = problem.q.shape[-1]
    if statistics > 1 and (width == 64 or problem.settings.entropy_every == 1):
        # Logarithms of one block in a few can hide behind products that are long enough.
        return False
    least = _FROM
    if problem.settings.causal:
        least = _POWERS_FROM if width == 64 and problem.settings.power > 1 else _CAUSAL_FROM
    enough = _items(problem, TILES[width]) >= processors(problem.q.device)
    return enough and min(problem.settings.max_q, problem.settings.max_k) >= least


def prepared(problem: Problem, statistics: int, out: Tensor) -> SpecialisedLaunch:
    """The launch for a call that it suits."""
    from reluformer.ops.backends.triton.hopper.forward import specialised_kernel

    q, k, v = problem.q, problem.k, problem.v
    width = q.shape[-1]
    tile = TILES[width]
    items = _items(problem, tile)
    like = tuning.Tile(tile.rows, tile.keys, 4, tile.stages)
    shared = {**tile_config(problem, like)._asdict(), "num_warps": 4}
    shared |= {"PRESCALE": shared["SCALE_SCORES"], "DIVIDE": shared["ROW_NORMALISE"]}
    named = ("GROUP", "D", "CAUSAL", "POWER", "HAS_THRESHOLD", "PRESCALE", "DIVIDE", "num_warps")
    made = _ForwardLaunch(
        specialised_kernel,
        min(items, processors(q.device)),
        (
            items, q.shape[1], tiles_of(problem.settings.max_q, tile.rows), problem.settings.max_q, problem.settings.max_k,
            *out.stride()[1:3], problem.settings.scale, problem.unit, problem.settings.threshold_value,
            problem.settings.length_exponent, problem.epsilon,
        ),
        {
            **{name: shared[name] for name in named},
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "STAGES": tile.stages,
            "Q_REGISTERS": tile.q_registers,
            "SUMS": statistics >= 1,
            "EVERY": problem.settings.entropy_every if statistics == 2 else 1,
        },
        [(q, tile.rows), (k, tile.keys), (v, tile.keys), (out, tile.rows)],
    )  # fmt: skip
    if problem.is_packed:
        made.room = _room(problem, tile)
    return made


def serves(problem: Problem, widths: Container[int], tensors: Sequence[Tensor]) -> bool:
    """Whether kernels with specialised warps for heads of these widths can run a call, all of whose
    tiled tensors these are."""
    if (
        problem.optional.mask is not None
        or problem.settings.window > 0
        or problem.settings.dropout_p > 0
    ):
        return False
    width = problem.q.shape[-1]
    if problem.q.dtype != torch.bfloat16 or width != problem.v.shape[-1] or width not in widths:
        return False
    return use_descriptors(tensors)


def at_home(tensor: Tensor) -> bool:
    """Whether GPU and Triton are those for which the kernels with specialised warps are made."""
    if not _TESTED or is_interpreting() or not tensor.is_cuda or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(tensor.device) == (9, 0)


def tiles_of(length: int, rows: int) -> int:
    """Of a sequence, with so many rows for each of the two consumers."""
    return int(triton.cdiv(length, 2 * rows))


def items_of(problem: Problem, heads: int, length: int, rows: int) -> int:
    """Tiles of all heads, or pairs of them where rows see different numbers of keys."""
    count = tiles_of(length, rows)
    each = triton.cdiv(count, 2) if problem.settings.causal else count
    return int(problem.q.shape[0] * heads * each)


def _items(problem: Problem, tile: Tile) -> int:
    """Of packed sequences as many as there may be."""
    heads = problem.q.shape[1]
    if problem.is_packed:
        return _room(problem, tile).total * heads
    return items_of(problem, heads, problem.settings.max_q, tile.rows)


def _room(problem: Problem, tile: Tile) -> WorkListSize:
    """For the list of work on packed sequences."""
    tokens, rows = problem.q.shape[2], 2 * tile.rows
    return work_list_size(
        tokens, problem.sequences, problem.settings.max_q, rows, paired=problem.settings.causal
    )
