"""Arguments and tiles that every launch derives from a `Problem`."""

import torch
import triton

from reluformer.ops.backends.torch_state import allows_tf32
from reluformer.ops.backends.triton import tuning
from reluformer.ops.backends.triton.portable.arguments import Config, Numbers
from reluformer.ops.backends.triton.problem import Problem, pad


def pick_tile(problem: Problem, kernel: tuning.Kernel, *, signs: bool = False) -> tuning.Tile:
    """The tile of `tuning` for a kernel; `signs` says that it stores or loads signs of weights."""
    settings = problem.settings
    # The kernel for dK and dV applies key lengths once per tile, outside its loop.
    is_padded = problem.optional.key_lengths is not None and kernel != "dkv"
    has_edges = problem.rows_vary or is_padded or settings.dropout_p > 0
    itemsize = problem.q.element_size()
    return tuning.pick(
        kernel, problem.width, has_edges, settings.max_k, itemsize, signs, shared_memory(problem)
    )


def row_config(problem: Problem) -> Config:
    """Switches of the kernels that make one pass over the rows."""
    optional, settings = problem.optional, problem.settings
    return Config(
        CAUSAL=settings.causal,
        WINDOW=settings.window > 0,
        HAS_LENGTHS=optional.key_lengths is not None,
        HAS_MASK=optional.mask is not None,
        PACKED=problem.is_packed,
        HAS_GAMMA=optional.gamma is not None,
        ROW_NORMALISE=problem.is_row_normalised,
    )


def tile_config(problem: Problem, tile: tuning.Tile) -> Config:
    """Switches and sizes that all kernels with a loop over tiles share."""
    q, v = problem.q, problem.v
    optional, settings = problem.optional, problem.settings
    return row_config(problem)._replace(
        POWER=settings.power,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        GROUP=problem.group,
        D=q.shape[-1],
        DV=v.shape[-1],
        D_PAD=pad(q.shape[-1]),
        DV_PAD=pad(v.shape[-1]),
        HAS_THRESHOLD=optional.threshold is not None or settings.threshold_value != 0.0,
        THRESHOLD_TENSOR=optional.threshold is not None,
        SCALE_SCORES=problem.scales_scores,
        DROPOUT=settings.dropout_p > 0.0,
        ONE_LOOP=tile.one_loop,
        PTX=has_ptx(problem),
        PRECISION=_precision(q.dtype),
    )


def numbers(problem: Problem) -> Numbers:
    """Floating-point arguments of all kernels."""
    settings = problem.settings
    return Numbers(
        settings.scale,
        problem.unit,
        settings.threshold_value,
        settings.length_exponent,
        settings.dropout_p,
        problem.epsilon,
    )


def row_arguments(problem: Problem) -> tuple[int, ...]:
    """Row strides and sizes, the `LENGTH_DEPENDENT` arguments of a pass over rows."""
    settings = problem.settings
    sizes = (problem.q.shape[1], settings.max_q, settings.max_k, settings.window)
    return (*problem.row_strides(), *sizes)


def tile_arguments(problem: Problem) -> tuple[int, ...]:
    """All `LENGTH_DEPENDENT` arguments in the order of the kernels."""
    return (*problem.mask_strides()[:3], *row_arguments(problem))


def has_ptx(problem: Problem) -> bool:
    """Whether the kernels may contain inline PTX, which has arithmetic of pairs of bfloat16.

    GPUs before Hopper (compute capability 9.0) do not have these instructions.
    """
    if not problem.q.is_cuda or torch.version.hip is not None or is_interpreting():
        return False
    return torch.cuda.get_device_capability(problem.q.device)[0] >= 9


def shared_memory(problem: Problem) -> int:
    """Bytes of shared memory that one program may have on the GPU of a call."""
    if not problem.q.is_cuda or is_interpreting():
        return tuning.UNLIMITED
    properties = torch.cuda.get_device_properties(problem.q.device)
    # AMD GPUs do not report it.
    return getattr(properties, "shared_memory_per_block_optin", tuning.UNLIMITED)


def is_interpreting() -> bool:
    """Whether Triton interprets the kernels instead of compiling them."""
    return bool(triton.knobs.runtime.interpret)


def _precision(dtype: torch.dtype) -> str:
    # float32 follows torch's own switches; three tf32 products keep float32 accuracy.
    if dtype != torch.float32 or is_interpreting():
        return "ieee"
    return "tf32" if allows_tf32() else "tf32x3"
