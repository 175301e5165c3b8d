"""Host side of the Hopper forward kernel: which calls it can run, when it is used, its launch."""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.triton import tuning, versions
from reluformer.ops.backends.triton.descriptors import View, use_descriptors
from reluformer.ops.backends.triton.hopper.arguments import (
    ForwardConfig,
    ForwardPointers,
    Scalars,
    as_constexpr,
)
from reluformer.ops.backends.triton.launch import Launch, processors
from reluformer.ops.backends.triton.plan import is_interpreting
from reluformer.ops.backends.triton.problem import Problem, Settings, cdiv
from reluformer.ops.backends.triton.run_packed import (
    MAX_SEQUENCES,
    WorkListSize,
    work_list,
    work_list_size,
)

# Number of queries and keys from which on the kernel is faster than the portable one: full calls,
# causal calls, and causal calls of power 8 and width 64.
_FROM, _CAUSAL_FROM, _CAUSAL_POWER_8_FROM = 256, 512, 2048

# Numbers of queries from which on other tiles were measured to be faster
# (`benchmarks/kernel_choices.py`). Tiles of 192 rows leave more rows of a short sequence empty.
_LONG, _VERY_LONG = 4096, 16384


class ForwardTile(NamedTuple):
    """Tile of the forward kernel."""

    consumers: int
    """Groups of four warps that compute: two or three."""
    rows: int
    """Query rows of each consumer."""
    keys: int
    stages: int
    q_in_registers: bool
    converts_late: bool = False
    """`CONVERT_LATE` of `ForwardConfig`."""

    @property
    def all_rows(self) -> int:
        """Query rows of all consumers."""
        return self.consumers * self.rows


WIDTHS = (64, 128)
"""Head widths that the kernel has tiles for."""
TILES = {
    (64, "two"): ForwardTile(2, 128, 64, 4, q_in_registers=False),
    (64, "late"): ForwardTile(2, 128, 64, 4, q_in_registers=False, converts_late=True),
    (64, "three"): ForwardTile(3, 64, 128, 4, q_in_registers=False, converts_late=True),
    (128, "two"): ForwardTile(2, 64, 64, 4, q_in_registers=True),
    (128, "late"): ForwardTile(2, 64, 128, 2, q_in_registers=True, converts_late=True),
}
"""Tiles by head width and name."""


class HopperLaunch(Launch):
    """Launch of a warp-specialised kernel."""

    def describe(self, tensor: Tensor, view: View) -> Any:
        """The TMA descriptor that Gluon kernels take."""
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
        return TensorDescriptor(tensor, *view, layout)


class ForwardLaunch(HopperLaunch):
    """Launch that takes the same tensors as a launch of the portable forward kernel."""

    work_size = WorkListSize(0, 0)
    """Size of the work list of packed sequences."""

    def __call__(self, *tensors: Any) -> None:
        """Run on q, k, v, out, row_sum, log_sum, count and an OptionalInputs."""
        q, k, v, out, row_sum, log_sum, _count, optional = tensors
        gamma, threshold, lengths, _mask, cu_q, cu_k, _seed = optional
        rest = work = None
        if cu_q is not None and cu_k is not None:
            config = self.options["CONFIG"]
            rows, paired = config.CONSUMERS.value * config.ROWS.value, config.CAUSAL.value
            rest, work = out, work_list(cu_q, cu_k, self.work_size, rows, paired=paired)
        pointers = ForwardPointers(rest, row_sum, log_sum, gamma, threshold, lengths, work)
        super().__call__(q, k, v, out, pointers)


def should_use(problem: Problem, statistics: int, out: Tensor) -> bool:
    """Whether the Hopper kernel runs a forward call: it can, and it is faster or was requested.

    Args:
        problem: the call.
        statistics: 0 for none, 1 for row sums, 2 for sums of w log w as well.
        out: the output tensor, [B, H, Tq, D].
    """
    requested = tuning.current().hopper
    if requested is False or any(name == "forward" for name, _ in tuning.current().tiles):
        return False
    if problem.is_packed and (statistics > 1 or problem.sequences > MAX_SEQUENCES):
        return False
    if not can_run(problem, WIDTHS, (problem.q, problem.k, problem.v, out)):
        return False
    return bool(requested) or (is_supported_gpu(out) and _is_faster(problem, statistics))


def forward_launch(problem: Problem, statistics: int, out: Tensor) -> HopperLaunch:
    """The launch of the Hopper kernel for a call that `should_use` accepts."""
    from reluformer.ops.backends.triton.hopper.forward import hopper_forward_kernel

    q, k, v = problem.q, problem.k, problem.v
    tile = _tile(problem, statistics)
    items = _items(problem, tile)
    has_threshold = uses_threshold(problem)
    config = ForwardConfig(
        D=q.shape[-1],
        GROUP=problem.group,
        CONSUMERS=tile.consumers,
        ROWS=tile.rows,
        KEYS=tile.keys,
        STAGES=tile.stages,
        Q_IN_REGISTERS=tile.q_in_registers,
        CONVERT_LATE=tile.converts_late,
        CAUSAL=problem.settings.causal,
        POWER=problem.settings.power,
        HAS_THRESHOLD=has_threshold,
        SCALE_SCORES=problem.scales_scores,
        MASK_TAIL=(has_threshold and problem.settings.max_k % tile.keys > 0)
        or problem.optional.key_lengths is not None
        or problem.is_packed,
        ROW_SUMS=statistics >= 1,
        ROW_NORMALISE=problem.is_row_normalised,
        ENTROPY_EVERY=problem.settings.entropy_every if statistics == 2 else 1,
    )
    sizes = (items, q.shape[1], tiles_per_head(problem.settings.max_q, tile.all_rows))
    launch = ForwardLaunch(
        hopper_forward_kernel,
        min(items, processors(q.device)),
        (
            *sizes,
            problem.settings.max_q,
            problem.settings.max_k,
            tuple(out.stride()[1:3]),
            scalars(problem),
        ),
        {"CONFIG": as_constexpr(config), "num_warps": 4},
        [(q, tile.rows), (k, tile.keys), (v, tile.keys), (out, tile.rows)],
    )
    if problem.is_packed:
        launch.work_size = _work_size(problem, tile)
    return launch


def can_run(problem: Problem, widths: Container[int], tensors: Sequence[Tensor]) -> bool:
    """Whether a Hopper kernel for heads of these widths can run a call.

    Args:
        problem: the call.
        widths: head widths that the kernel has tiles for.
        tensors: all tensors that the kernel reads or writes in tiles.
    """
    if problem.optional.mask is not None:
        return False
    if problem.settings.window > 0 or problem.settings.dropout_p > 0:
        return False
    width = problem.q.shape[-1]
    if problem.q.dtype != torch.bfloat16 or width != problem.v.shape[-1] or width not in widths:
        return False
    return use_descriptors(tensors)


def is_supported_gpu(tensor: Tensor) -> bool:
    """Whether the tensor is on a Hopper GPU and Triton is a version the kernels are tested with."""
    if not versions.runs_hopper() or is_interpreting() or not tensor.is_cuda:
        return False
    if torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(tensor.device) == (9, 0)


def scalars(problem: Problem) -> Scalars:
    """The numbers of the rule, as the kernels take them."""
    settings = problem.settings
    return Scalars(
        settings.scale,
        problem.unit,
        settings.threshold_value,
        settings.length_exponent,
        problem.epsilon,
    )


def uses_threshold(problem: Problem) -> bool:
    """Whether scores are compared with a threshold other than 0."""
    return problem.optional.threshold is not None or problem.settings.threshold_value != 0.0


def tiles_per_head(length: int, rows: int) -> int:
    """Number of tiles of `rows` rows in a sequence."""
    return cdiv(length, rows)


def work_items(problem: Problem, heads: int, length: int, rows: int) -> int:
    """Number of tiles of all heads; with causality, of pairs of tiles."""
    tiles = tiles_per_head(length, rows)
    per_head = cdiv(tiles, 2) if problem.settings.causal else tiles
    return problem.q.shape[0] * heads * per_head


def _is_faster(problem: Problem, statistics: int) -> bool:
    """Whether the Hopper kernel was measured to be faster than the portable one."""
    width = problem.q.shape[-1]
    if statistics > 1 and (width == 64 or problem.settings.entropy_every == 1):
        # Only the logarithms of sampled blocks hide behind products, and only long ones.
        return False
    shortest = _CAUSAL_FROM if problem.settings.causal else _FROM
    if problem.settings.causal and problem.settings.power == 8 and width == 64:
        shortest = _CAUSAL_POWER_8_FROM
    fills_gpu = _items(problem, _tile(problem, statistics)) >= processors(problem.q.device)
    return fills_gpu and min(problem.settings.max_q, problem.settings.max_k) >= shortest


def _tile(problem: Problem, statistics: int) -> ForwardTile:
    """The tile of a call: that of `tuning.override`, if it supports the call, or the default."""
    width, settings = problem.q.shape[-1], problem.settings
    if statistics > 1:
        # Blocks of sampled entropies are whole tiles of two consumers.
        return TILES[width, "two"]
    default = fastest_tile(width, settings)
    requested = TILES.get((width, tuning.current().forward_tile or default))
    return requested or TILES[width, default]


def fastest_tile(width: int, settings: Settings) -> str:
    """Name of the tile that was measured to be the fastest."""
    power, length = settings.power, settings.max_q
    if not versions.runs_recent_hopper():
        return "two"
    if width == 128:
        return "late" if power > 1 and length >= _LONG else "two"
    if settings.causal:
        if power == 1:
            return "two"
        return "three" if power > 2 and length >= _VERY_LONG else "late"
    if length >= (_VERY_LONG if power == 1 else _LONG):
        return "three"
    return "late" if power > 2 else "two"


def _items(problem: Problem, tile: ForwardTile) -> int:
    """Number of work items; an upper bound for packed sequences."""
    heads = problem.q.shape[1]
    if problem.is_packed:
        return _work_size(problem, tile).total * heads
    return work_items(problem, heads, problem.settings.max_q, tile.all_rows)


def _work_size(problem: Problem, tile: ForwardTile) -> WorkListSize:
    """Size of the work list of packed sequences."""
    settings = problem.settings
    return work_list_size(
        problem.q.shape[2], problem.sequences, settings.max_q, tile.all_rows, paired=settings.causal
    )
