"""Host side of the Hopper backward kernels: which calls they can run, when they are used, launches.

The launches take their tensors in the same order as the launches of the portable kernels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.triton import tuning, versions
from reluformer.ops.backends.triton.hopper.arguments import (
    BackwardConfig,
    BackwardPointers,
    as_constexpr,
)
from reluformer.ops.backends.triton.hopper.launch_forward import (
    HopperLaunch,
    can_run,
    is_supported_gpu,
    scalars,
    tiles_per_head,
    uses_threshold,
    work_items,
)
from reluformer.ops.backends.triton.launch import Launch, processors
from reluformer.ops.backends.triton.portable.device import BLOCK
from reluformer.ops.backends.triton.portable.sign_bits import SIDE, WIDEST
from reluformer.ops.backends.triton.problem import Problem, Settings, cdiv

_SIDE = int(SIDE.value)
# Number of queries and keys from which on the kernels were measured to be faster.
_FROM = 256


class Buffering(NamedTuple):
    """How a backward kernel holds its operands."""

    stages: int
    """Sets of buffers for streamed tiles."""
    in_registers: bool
    """Whether resident tiles are held in registers."""
    rows: int = _SIDE
    """Rows that each consumer owns."""
    cols: int = _SIDE
    """Rows of a streamed tile."""
    consumers: int = 2
    """Groups of four warps that compute."""


# By head width: for dK/dV, for dQ, and for dQ from signs.
_DKV = {64: Buffering(8, True), 128: Buffering(4, False)}
_DQ = {64: Buffering(8, True), 128: Buffering(4, False)}
_DQ_FROM_SIGNS = {64: Buffering(8, True), 128: Buffering(5, True)}
# For width 64 on request, by kernel and name: wide tiles take fewer instructions a score, and
# leave no register to spare; three consumers have fewer registers each.
_NAMED: dict[tuple[tuning.Kernel, str], Buffering] = {
    ("dkv", "wide"): Buffering(4, False, cols=2 * _SIDE),
    ("dq", "wide"): Buffering(4, False, cols=2 * _SIDE),
    ("dq", "three"): Buffering(8, False, consumers=3),
}
# For dQ from score gradients, by head width and rows. More rows read fewer key tiles, and fewer
# rows fill the GPU: with causality tiles come in pairs.
_DQ_PRODUCT = {
    (64, 2 * _SIDE): Buffering(4, False, 2 * _SIDE),
    (128, 2 * _SIDE): Buffering(3, False, 2 * _SIDE),
    (64, _SIDE): Buffering(7, False),
    (128, _SIDE): Buffering(5, False),
}


class DkvLaunch(HopperLaunch):
    """Launch that takes the same tensors as a launch of the portable dK/dV kernel."""

    def __call__(self, *tensors: Any) -> None:
        """Run on q, k, v, grad_out, dk, dv, stored, terms, count, row_sum and an OptionalInputs."""
        *tiled, stored, terms, _count, _row_sum, optional = tensors
        super().__call__(*tiled, BackwardPointers(None, stored, terms, *optional[:3]))


class DqLaunch(HopperLaunch):
    """Launch of the dQ kernel."""

    def __call__(self, *tensors: Any) -> None:
        """Run on q, k, v, grad_out, dq, row_shift, signs, terms and an OptionalInputs."""
        *tiled, row_shift, signs, terms, optional = tensors
        super().__call__(*tiled, BackwardPointers(row_shift, signs, terms, *optional[:3]))


class DqProductLaunch(HopperLaunch):
    """Launch of the dQ kernel that reads score gradients; takes the same tensors."""

    def __call__(self, *tensors: Any) -> None:
        """Run on q, k, v, grad_out, dq, row_shift, score gradients, terms and an OptionalInputs."""
        _q, k, _v, _grad_out, dq, row_shift, gradients, _terms, optional = tensors
        blocks = gradients.view(torch.bfloat16).view(1, 1, -1, _SIDE)
        super().__call__(blocks, k, dq, BackwardPointers(row_shift, None, None, *optional[:3]))


def should_use(problem: Problem, level: int, tensors: Sequence[Tensor], *, signs_pay: bool) -> bool:
    """Whether the Hopper kernels run a backward: they can, and are faster or were requested.

    Args:
        problem: the call.
        level: `Gradients.level`.
        tensors: all tensors that the kernels read or write in tiles.
        signs_pay: whether the portable kernels would store signs of weights.
    """
    options = tuning.current()
    if options.hopper is False or any(name in ("dkv", "dq") for name, _ in options.tiles):
        return False
    if level > 1 or problem.is_packed or not can_run(problem, _DKV, tensors):
        return False
    if options.hopper:
        return True
    return is_supported_gpu(problem.q) and _is_faster(problem, signs_pay=signs_pay)


def signs_are_faster(problem: Problem) -> bool:
    """Whether the Hopper kernels are faster with stored signs than with scores computed again."""
    return problem.q.shape[-1] > 64


def stored_gradients_are_faster(problem: Problem) -> bool:
    """Whether the kernels were measured to be faster with stored score gradients."""
    settings = problem.settings
    lengths = lengths_to_store(problem.q.shape[-1], settings)
    return settings.max_q in lengths and settings.max_k in lengths


def lengths_to_store(width: int, settings: Settings) -> range:
    """Numbers of queries and keys for which `benchmarks/kernel_choices.py` measured a gain.

    Calls of width 64 are slower: their gradients are as large for half of the arithmetic. Few heads
    of longer calls fit into memory at a time. Causal calls allocate the blocks that they skip.
    """
    if width != 128 or not versions.runs_recent_hopper():
        return range(0)
    if settings.causal:
        return range(4096, 8193) if settings.power > 2 else range(0)
    is_plain = settings.power == 1 and settings.row_normalise == 0
    return range(1024, 4097 if is_plain else 8193)


def query_tile_rows(problem: Problem, *, gradients: bool) -> int:
    """Query rows of a tile of the kernel for dK and dV, which loads row terms for whole tiles."""
    return _dkv_buffering(problem, gradients).cols


def dkv_launch(
    problem: Problem, level: int, grad_out: Tensor, dk: Tensor, dv: Tensor, *, signs: bool,
    gradients: bool,
) -> Launch:  # fmt: skip
    """The launch for dk and dv, which stores signs or score gradients."""
    from reluformer.ops.backends.triton.hopper.backward_dkv import hopper_dkv_kernel

    q, k, v = problem.q, problem.k, problem.v
    buffering = _dkv_buffering(problem, gradients)
    config = _config(problem, level, buffering, signs=signs, gradients=gradients)
    tiled = [(q, config.COLS), (k, config.ROWS), (v, config.ROWS), (grad_out, config.COLS)]
    tiled += [(dk, config.ROWS), (dv, config.ROWS)]
    return _launch(
        DkvLaunch, hopper_dkv_kernel, problem, config, tiled, k.shape[1], problem.settings.max_k
    )


def dq_launch(problem: Problem, level: int, grad_out: Tensor, dq: Tensor, *, signs: bool) -> Launch:
    """The launch for dq."""
    from reluformer.ops.backends.triton.hopper.backward_dq import hopper_dq_kernel

    q, k, v = problem.q, problem.k, problem.v
    usual = (_DQ_FROM_SIGNS if signs else _DQ)[q.shape[-1]]
    buffering = _named(problem, "dq", tuning.current().dq_tile) or usual
    config = _config(problem, level, buffering, signs=signs)
    tiled = [(q, config.ROWS), (k, config.COLS), (v, config.COLS), (grad_out, config.ROWS)]
    tiled += [(dq, config.ROWS)]
    return _launch(
        DqLaunch, hopper_dq_kernel, problem, config, tiled, q.shape[1], problem.settings.max_q
    )


def dq_product_launch(problem: Problem, dq: Tensor, heads: int) -> Launch:
    """The launch for dq from stored score gradients of at most `heads` heads."""
    from reluformer.ops.backends.triton.hopper.backward_dq_product import hopper_dq_product_kernel

    q, k = problem.q, problem.k
    usual = _SIDE if problem.settings.causal else 2 * _SIDE
    buffering = _DQ_PRODUCT[q.shape[-1], tuning.current().product_rows or usual]
    config = _config(problem, 0, buffering, gradients=True)
    rows = heads * gradient_blocks(problem) * _SIDE
    # Only its shape and strides are read.
    gradients = torch.empty((1, 1, rows, _SIDE), dtype=torch.bfloat16, device="meta")
    tiled = [(gradients, config.ROWS), (k, _SIDE), (dq, config.ROWS)]
    return _launch(
        DqProductLaunch, hopper_dq_product_kernel, problem, config, tiled, q.shape[1],
        problem.settings.max_q,
    )  # fmt: skip


def gradient_blocks(problem: Problem) -> int:
    """Blocks of 64 x 64 score gradients of a head that have memory."""
    blocks = _head_blocks(problem)
    if _is_compact(problem):
        queries, keys = problem.settings.max_q, problem.settings.max_k
        key_blocks = cdiv(keys, _SIDE)
        # As `missing_blocks` of the stored gradients: 0, 1, 2, ... of the key blocks at the end.
        last = key_blocks - cdiv(max(keys - queries, 0), _SIDE)
        blocks = key_blocks * (_padded_queries(problem) // _SIDE) - last * (last - 1) // 2
    return blocks


def _dkv_buffering(problem: Problem, gradients: bool) -> Buffering:
    usual = _DKV[problem.q.shape[-1]]
    if gradients:
        # Blocks of score gradients are narrow.
        return usual
    return _named(problem, "dkv", tuning.current().dkv_tile) or usual


def _is_compact(problem: Problem) -> bool:
    return problem.settings.causal and tuning.current().compact_gradients


def _named(problem: Problem, kernel: tuning.Kernel, name: str | None) -> Buffering | None:
    """The buffering that is requested by name, if loops of this call do not spill with it."""
    settings = problem.settings
    if name is None or problem.q.shape[-1] != 64 or settings.power == 1:
        return None
    if kernel == "dkv" and (settings.causal or settings.power == 8):
        # There are no registers for masks and for power 8.
        return None
    return _NAMED[kernel, name]


def _is_faster(problem: Problem, *, signs_pay: bool) -> bool:
    """Whether the Hopper kernels were measured to be faster than the portable ones."""
    if signs_pay and not signs_are_faster(problem) and not problem.settings.causal:
        # Six products take less time than seven, and the portable kernels store signs at less cost.
        return False
    heads = min(problem.q.shape[1], problem.k.shape[1])
    shortest = min(problem.settings.max_q, problem.settings.max_k)
    fills_gpu = work_items(problem, heads, shortest, 2 * _SIDE) >= processors(problem.q.device)
    return fills_gpu and shortest >= _FROM


def _config(
    problem: Problem, level: int, buffering: Buffering, *, signs: bool = False,
    gradients: bool = False,
) -> BackwardConfig:  # fmt: skip
    return BackwardConfig(
        D=problem.q.shape[-1],
        GROUP=problem.group,
        CONSUMERS=buffering.consumers,
        ROWS=buffering.rows,
        COLS=buffering.cols,
        STAGES=buffering.stages,
        IN_REGISTERS=buffering.in_registers,
        CAUSAL=problem.settings.causal,
        POWER=problem.settings.power,
        HAS_THRESHOLD=uses_threshold(problem),
        SCALE_SCORES=problem.scales_scores,
        ROW_TERMS=level == 1,
        GRAD_SCALED=problem.has_row_factors,
        RAGGED=problem.settings.max_k % buffering.cols > 0,
        SIGNS=signs,
        GRADIENTS=gradients,
        COMPACT=gradients and _is_compact(problem),
        SEPARATE_SCORES=(
            problem.settings.power > 1 and problem.q.shape[-1] == 64 and buffering.cols == _SIDE
        ),
    )


def _launch(
    launch: type[HopperLaunch],
    kernel: Any,
    problem: Problem,
    config: BackwardConfig,
    tiled: Sequence[tuple[Tensor, int]],
    heads: int,
    length: int,
) -> Launch:
    """The launch of a kernel that owns tiles of `heads` sequences of that length.

    `tiled` are the tensors that it reads or writes in tiles, each with the rows of a tile.
    """
    max_q, max_k = problem.settings.max_q, problem.settings.max_k
    rows = config.CONSUMERS * config.ROWS
    items = work_items(problem, heads, length, rows)
    tiles = tiles_per_head(length, rows)
    head_blocks = gradient_blocks(problem) if config.GRADIENTS else _head_blocks(problem)
    sizes = (items, heads, tiles, max_q, max_k, _key_blocks(problem), head_blocks)
    return launch(
        kernel,
        min(items, processors(problem.q.device)),
        (*sizes, _padded_queries(problem), scalars(problem)._replace(epsilon=None)),
        {"CONFIG": as_constexpr(config), "num_warps": 4},
        tiled,
    )


def _padded_queries(problem: Problem) -> int:
    """Queries of a head, padded to whole blocks of the passes over rows."""
    return int(cdiv(problem.settings.max_q, BLOCK.value) * BLOCK.value)


def _key_blocks(problem: Problem) -> int:
    """Blocks of 64 along the keys, padded to the widest tile."""
    return int(cdiv(problem.settings.max_k, WIDEST.value) * (WIDEST.value // _SIDE))


def _head_blocks(problem: Problem) -> int:
    """Blocks of 64 x 64 queries and keys of a head."""
    return _padded_queries(problem) // _SIDE * _key_blocks(problem)
