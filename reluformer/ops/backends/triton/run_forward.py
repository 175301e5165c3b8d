"""Host side of the forward pass: allocation and launch."""

import torch
from torch import Tensor

from reluformer.ops.backends.triton import plan, run_decode
from reluformer.ops.backends.triton.descriptors import use_descriptors
from reluformer.ops.backends.triton.hopper import launch_forward
from reluformer.ops.backends.triton.launch import (
    LAUNCHES,
    KeyParts,
    Launch,
    on_other_device,
    signature,
)
from reluformer.ops.backends.triton.layout import row_values, zeroed
from reluformer.ops.backends.triton.portable.arguments import Strides
from reluformer.ops.backends.triton.portable.forward import forward_kernel
from reluformer.ops.backends.triton.problem import Problem, cdiv, head_strides
from reluformer.ops.backends.triton.run_packed import empty_packed_heads

ForwardResult = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Output, row sums, sums of w log w and visible counts."""


def forward(problem: Problem, statistics: int) -> ForwardResult:
    """Run the forward pass.

    Args:
        problem: The call.
        statistics: 0 for none, 1 for row sums (required by row normalisation), 2 for sums of
            w log w too.

    Returns:
        Output [B, H, Tq, Dv], row sums, sums of w log w, and, with a mask, the number of visible
        keys of each row; None for those that are not computed. Row values are float32 [B, H, Tq],
        or [N, H] for packed calls.
    """
    if on_other_device(problem.q):
        with torch.cuda.device(problem.q.device):
            return forward(problem, statistics)
    q, k, v, optional, _ = problem
    assert statistics >= 1 or not problem.is_row_normalised
    if q.shape[2] <= run_decode.MAX_QUERIES and statistics <= 1 and run_decode.should_use(problem):
        out, row_sum, count = run_decode.decode(problem, row_sums=statistics == 1)
        return out, row_sum, None, count
    packed = problem.is_packed
    out = empty_packed_heads(q, v.shape[-1], optional.cu_q)
    row_sum = row_values(q, packed=packed) if statistics >= 1 else None
    log_sum = row_values(q, packed=packed) if statistics >= 2 else None
    count = row_values(q, packed=packed) if optional.mask is not None else None
    if out.numel() == 0 or k.numel() == 0:
        return out.zero_(), zeroed(row_sum), zeroed(log_sum), zeroed(count)
    key = signature(*key_parts(problem, statistics))
    launch = LAUNCHES.get(key)
    if launch is None:
        # Both kernels compute the same function; the choice affects speed only.
        if launch_forward.should_use(problem, statistics, out):
            launch = launch_forward.forward_launch(problem, statistics, out)
        else:
            launch = _portable_launch(problem, statistics, out)
        LAUNCHES.put(key, launch)
    launch(q, k, v, out, row_sum, log_sum, count, optional)
    return out, row_sum, log_sum, count


def key_parts(problem: Problem, statistics: int) -> KeyParts:
    """Arguments of `signature` for the key of a forward pass in `LAUNCHES`."""
    return ("forward", statistics, problem.settings), problem.tensors


def _portable_launch(problem: Problem, statistics: int, out: Tensor) -> Launch:
    """The launch of the kernel that supports every call."""
    q, k, v = problem.q, problem.k, problem.v
    tile = plan.pick_tile(problem, "forward")
    tma = use_descriptors((q, k, v, out))
    tiled = [(q, tile.queries), (k, tile.keys), (v, tile.keys), (out, tile.queries)]
    if problem.is_packed:
        # The output of a packed call is stored through pointers: tiles cross sequences.
        tiled.pop()
    config = plan.tile_config(problem, tile)._replace(
        STATISTICS=statistics,
        ENTROPY_EVERY=problem.settings.entropy_every if statistics == 2 else 1,
        TMA=tma,
    )
    strides = Strides(
        q=head_strides(q),
        k=head_strides(k),
        v=head_strides(v),
        out=head_strides(out),
        mask_key=problem.mask_strides()[3],
    )
    return Launch(
        forward_kernel,
        cdiv(problem.settings.max_q, tile.queries) * problem.sequences * q.shape[1],
        (strides, *plan.tile_arguments(problem), plan.numbers(problem)),
        {"CONFIG": config, "num_warps": tile.warps, "num_stages": tile.stages},
        tiled if tma else (),
    )
