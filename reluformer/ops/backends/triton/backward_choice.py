"""Which kernels run a backward, and whether the first leaves signs of weights to the second.

All of them compute the same, so this is a question of speed and memory alone.
"""

from typing import Any, NamedTuple

import triton
from torch import Tensor

from reluformer.ops.backends.triton import tuning
from reluformer.ops.backends.triton.hopper import launch_backward
from reluformer.ops.backends.triton.plan import Problem
from reluformer.ops.backends.triton.portable.device import BLOCK
from reluformer.ops.backends.triton.portable.sign_bits import SIDE, WIDEST

# Signs pay from this many queries and keys on, up to this width (`benchmarks/backward.py`: not
# measured elsewhere), and are given this much memory.
_SIGNS_FROM, _SIGNS_TO = 1024, 128
_SIGN_BYTES = 256 << 20
_LIMIT = 4096


class Choice(NamedTuple):
    """How a backward runs."""

    specialised: bool
    """By the kernels with specialised warps."""
    heads: int
    """Of how many query heads, over all batches, the signs are kept at a time; 0: they are not."""


_CHOICES: dict[tuple[Any, ...], Choice] = {}


def choice(key: tuple[Any, ...], problem: Problem, level: int, grad_out: Tensor) -> Choice:
    """`choose`, once for each signature: to ask takes longer than a short kernel runs."""
    found = _CHOICES.get(key)
    if found is None:
        found = choose(problem, level, grad_out)
        if key:
            if len(_CHOICES) >= _LIMIT:
                _CHOICES.clear()
            _CHOICES[key] = found
    return found


def choose(problem: Problem, level: int, grad_out: Tensor) -> Choice:
    """For a call with gradients of that level."""
    tensors = (problem.q, problem.k, problem.v, grad_out)
    pays = _signs_pay(problem) and tuning.current().sign_bytes != 0
    specialised = launch_backward.suits(problem, level, tensors, signs_pay=pays)
    return Choice(specialised, _heads_with_signs(problem, level, specialised))


def sign_bytes(problem: Problem) -> int:
    """Of the signs of one head, padded to whole tiles."""
    rows = triton.cdiv(problem.max_q, BLOCK.value) * BLOCK.value
    cols = triton.cdiv(problem.max_k, WIDEST.value) * WIDEST.value
    return int(rows * cols // 8)


def _signs_pay(problem: Problem) -> bool:
    long_enough = min(problem.max_q, problem.max_k) >= _SIGNS_FROM
    return problem.power == 1 and long_enough and problem.width <= _SIGNS_TO


def _heads_with_signs(problem: Problem, level: int, specialised: bool) -> int:
    """The derivative of a ReLU, unlike that of its powers, is known from the sign alone."""
    if problem.power > 1 or level > 1 or problem.packed:
        return 0
    if problem.mask is not None or problem.dropout_p > 0:
        return 0
    limit = tuning.current().sign_bytes
    if limit is None:
        pays = _signs_pay(problem)
        if specialised:
            pays = pays and launch_backward.keeps_signs(problem)
        limit = _SIGN_BYTES if pays else 0
    if limit == 0:
        return 0
    # The specialised kernels' tiles are blocks of signs.
    names: tuple[tuning.Kernel, ...] = () if specialised else ("keys", "queries")
    used = [problem.tile(name, signs=True) for name in names]
    if any(tile.queries % SIDE.value or tile.keys % SIDE.value for tile in used):
        return 0
    if any(tile.queries > BLOCK.value or tile.keys > WIDEST.value for tile in used):
        return 0
    heads = min(limit // sign_bytes(problem), problem.q.shape[0] * problem.q.shape[1])
    return heads if heads >= problem.group else 0
