"""Host side of the forward pass: what it allocates and launches."""

import torch
import triton
from torch import Tensor

from reluformer.ops.backends.triton import run_decode
from reluformer.ops.backends.triton.hopper import launch_forward
from reluformer.ops.backends.triton.launch import (
    LAUNCHES,
    Launch,
    on_other_device,
    remember,
    signature,
    use_descriptors,
)
from reluformer.ops.backends.triton.layout import row_values, zeroed
from reluformer.ops.backends.triton.plan import Problem
from reluformer.ops.backends.triton.portable.clear_unused_rows import packed_heads
from reluformer.ops.backends.triton.portable.forward import forward_kernel

Forward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def forward(problem: Problem, statistics: int) -> Forward:
    """(output, row sums, sums of w log w, visible counts), None for what is not there.

    `statistics` is 0 for none, 1 for row sums, 2 for both; counts come with a mask. To divide
    by row sums, which the backward pass does too, they must be asked for.
    """
    if on_other_device(problem.q):
        with torch.cuda.device(problem.q.device):
            return forward(problem, statistics)
    q, k, v = problem.q, problem.k, problem.v
    packed = problem.packed
    assert statistics >= 1 or not problem.divided
    if statistics <= 1 and run_decode.suits(problem):
        out, row_sum, count = run_decode.decode(problem, row_sums=statistics == 1)
        return out, row_sum, None, count
    out = packed_heads(q, v.shape[-1], problem.cu_q)
    row_sum = row_values(q, packed=packed) if statistics >= 1 else None
    log_sum = row_values(q, packed=packed) if statistics >= 2 else None
    count = row_values(q, packed=packed) if problem.mask is not None else None
    if out.numel() == 0 or k.numel() == 0:
        return out.zero_(), zeroed(row_sum), zeroed(log_sum), zeroed(count)
    key = signature(("forward", statistics, *problem[10:]), problem.tensors)
    launch = LAUNCHES.get(key)
    if launch is None:
        # Which kernel is a choice of speed alone, as a tile is: both compute the same.
        suited = launch_forward.suits(problem, statistics, out)
        launch = (launch_forward.prepared if suited else _prepared)(problem, statistics, out)
        remember(key, launch)
    launch(q, k, v, out, row_sum, log_sum, count, *problem.optional)
    return out, row_sum, log_sum, count


def _prepared(problem: Problem, statistics: int, out: Tensor) -> Launch:
    """The launch of the kernel that serves every call."""
    q, k, v = problem.q, problem.k, problem.v
    tile = problem.tile("forward")
    return Launch(
        forward_kernel,
        tile,
        triton.cdiv(problem.max_q, tile.queries) * problem.sequences * q.shape[1],
        [(q, tile.queries), (k, tile.keys), (v, tile.keys), (out, tile.queries)],
        (*problem.mask_steps(), *problem.row_steps(), *problem.numbers()),
        {
            **problem.switches(tile),
            "STATISTICS": statistics,
            "EVERY": problem.entropy_every if statistics == 2 else 1,
            "TMA": use_descriptors((q, k, v, out)),
        },
        store_by_pointer=int(problem.packed),
    )


def paged(
    problem: Problem, table: Tensor, key_min: Tensor | None, key_max: Tensor | None
) -> Tensor:
    """Output of a call on pages of keys and values: `decode_launch`."""
    if on_other_device(problem.q):
        with torch.cuda.device(problem.q.device):
            return paged(problem, table, key_min, key_max)
    return run_decode.decode(problem, run_decode.Pages(table, key_min, key_max))[0]
