"""Which kernels run a backward pass, and what the first leaves to the second in memory.

All kernels compute the same gradients; the choice affects speed and memory only.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.ops.backends.triton import plan, tuning
from reluformer.ops.backends.triton.hopper import launch_backward
from reluformer.ops.backends.triton.portable.device import BLOCK
from reluformer.ops.backends.triton.portable.sign_bits import SIDE, SLACK, WIDEST, WORDS
from reluformer.ops.backends.triton.problem import Problem, cdiv, pad

# Signs are faster from this many queries and keys on, up to this width (measured with
# `benchmarks/backward.py`; other widths were not measured), and may take this much memory.
_SIGNS_MIN_LENGTH, _SIGNS_MAX_WIDTH = 1024, 128
_SIGN_BYTES = 256 << 20
# Memory for score gradients.
_GRADIENT_BYTES = 512 << 20
# Largest tile of the kernel that computes all gradients: [128, 128] in bfloat16.
_ONE_PASS_BYTES = 32 << 10


class Choice(NamedTuple):
    """How a backward pass runs."""

    uses_hopper: bool
    """Whether the warp-specialised kernels run."""
    sign_heads: int
    """Query heads, over all batches, whose signs are stored at a time; 0 without signs."""
    gradient_heads: int = 0
    """The same for score gradients, which are stored instead of signs."""
    is_one_pass: bool = False
    """Whether one kernel computes all gradients."""

    @property
    def stored_heads(self) -> int:
        """Query heads that run at a time because of what is stored of them; 0 for all heads."""
        return self.sign_heads or self.gradient_heads


def choose(problem: Problem, level: int, grad_out: Tensor) -> Choice:
    """The choice for a call whose gradients have this `Gradients.level`."""
    if tuning.current().one_pass and _fits_one_pass(problem):
        return Choice(uses_hopper=False, sign_heads=0, is_one_pass=True)
    tensors = (problem.q, problem.k, problem.v, grad_out)
    signs_pay = _signs_are_faster(problem) and tuning.current().sign_bytes != 0
    uses_hopper = launch_backward.should_use(problem, level, tensors, signs_pay=signs_pay)
    gradient_heads = _gradient_heads(problem) if uses_hopper else 0
    sign_heads = 0 if gradient_heads else _sign_heads(problem, level, uses_hopper)
    return Choice(uses_hopper, sign_heads, gradient_heads)


def new_store(problem: Problem, choice: Choice) -> tuple[int, torch.dtype] | None:
    """Length and dtype of the tensor that the first kernel leaves to the second, if it does."""
    if choice.gradient_heads > 0:
        return choice.gradient_heads * gradient_bytes(problem) // 4, torch.int32
    if choice.sign_heads > 0:
        # Readers of signs read ahead of the last block.
        words = choice.sign_heads * sign_bytes(problem) // 2 + SLACK * int(WORDS.value)
        return words, torch.int16
    return None


def sign_bytes(problem: Problem) -> int:
    """Bytes for the signs of one head, padded to whole tiles."""
    rows = cdiv(problem.settings.max_q, BLOCK.value) * BLOCK.value
    cols = cdiv(problem.settings.max_k, WIDEST.value) * WIDEST.value
    return int(rows * cols // 8)


def gradient_bytes(problem: Problem) -> int:
    """Bytes for the score gradients of one head, in bfloat16."""
    return 2 * int(SIDE.value) ** 2 * launch_backward.gradient_blocks(problem)


def one_pass_tile(problem: Problem) -> tuning.Tile:
    """The tile that holds all queries and keys of a sequence."""
    queries, keys = (max(pad(n), 16) for n in (problem.settings.max_q, problem.settings.max_k))
    return tuning.Tile(queries, keys, 8 if max(queries, keys) > 64 else 4, 1)


def _fits_one_pass(problem: Problem) -> bool:
    """Whether `one_pass_kernel` can run.

    Its tiles are in registers. float16 would lose small gradients, which it rounds with their row
    factors.
    """
    if problem.optional.mask is not None or problem.settings.dropout_p > 0:
        return False
    tile = one_pass_tile(problem)
    side = max(tile.queries, tile.keys)
    itemsize = problem.q.element_size()
    fits = side * max(side, problem.width) * itemsize <= _ONE_PASS_BYTES
    return fits and problem.q.dtype != torch.float16


def _signs_are_faster(problem: Problem) -> bool:
    settings = problem.settings
    is_long = min(settings.max_q, settings.max_k) >= _SIGNS_MIN_LENGTH
    return settings.power == 1 and is_long and problem.width <= _SIGNS_MAX_WIDTH


def _gradient_heads(problem: Problem) -> int:
    """`Choice.gradient_heads` of a call that the Hopper kernels run."""
    limit = tuning.current().gradient_bytes
    each = gradient_bytes(problem)
    if limit is None:
        is_faster = launch_backward.stored_gradients_are_faster(problem)
        limit = _GRADIENT_BYTES if is_faster else 0
    heads = min(limit // each, problem.q.shape[0] * problem.q.shape[1])
    return heads if heads >= problem.group else 0


def _sign_heads(problem: Problem, level: int, uses_hopper: bool) -> int:
    """`Choice.sign_heads`. Only for power 1 does the derivative depend on the sign alone."""
    if problem.settings.power > 1 or level > 1 or problem.is_packed:
        return 0
    if problem.optional.mask is not None or problem.settings.dropout_p > 0:
        return 0
    limit = tuning.current().sign_bytes
    if limit is None:
        is_faster = _signs_are_faster(problem)
        if uses_hopper:
            is_faster = is_faster and launch_backward.signs_are_faster(problem)
        limit = _SIGN_BYTES if is_faster else 0
    if limit == 0:
        return 0
    # Tiles must be whole blocks of signs; those of the Hopper kernels always are.
    kernels: tuple[tuning.Kernel, ...] = () if uses_hopper else ("dkv", "dq")
    for kernel in kernels:
        tile = plan.pick_tile(problem, kernel, signs=True)
        if tile.queries % SIDE.value or tile.keys % SIDE.value:
            return 0
        if tile.queries > BLOCK.value or tile.keys > WIDEST.value:
            return 0
    heads = min(limit // sign_bytes(problem), problem.q.shape[0] * problem.q.shape[1])
    return heads if heads >= problem.group else 0
