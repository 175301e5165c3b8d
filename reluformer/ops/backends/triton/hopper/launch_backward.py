"""Host side of the specialised backward: which calls it serves, and how it is launched."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor

from reluformer.ops.backends.triton import tuning
from reluformer.ops.backends.triton.hopper.launch_forward import (
    SpecialisedLaunch,
    at_home,
    items_of,
    serves,
    tiles_of,
)
from reluformer.ops.backends.triton.launch import Launch, processors
from reluformer.ops.backends.triton.plan import tile_config
from reluformer.ops.backends.triton.portable.device import BLOCK
from reluformer.ops.backends.triton.portable.sign_bits import SIDE, WIDEST
from reluformer.ops.backends.triton.problem import Problem

_SIDE = int(SIDE.value)
# So many queries and keys have been measured to pay.
_FROM = 256


class Buffers(NamedTuple):
    """Buffers for tiles that are walked, and whether what is owned is held in registers."""

    stages: int
    in_registers: bool


# By width of a head: for gradients of keys, of queries, and of queries by signs.
_KEYS = {64: Buffers(8, True), 128: Buffers(4, False)}
_QUERIES = {64: Buffers(8, True), 128: Buffers(4, False)}
_SIGNED = {64: Buffers(8, True), 128: Buffers(5, True)}


def suits(problem: Problem, level: int, tensors: Sequence[Tensor], *, signs_pay: bool) -> bool:
    """Whether the specialised kernels serve a call, all of whose tiled tensors these are, and pay.

    `level` is that of its gradients; `signs_pay` says that the plain kernels would keep signs.
    """
    chosen = tuning.current()
    if chosen.specialised is False or any(name in ("dkv", "dq") for name, _ in chosen.tiles):
        return False
    if level > 1 or problem.is_packed or not serves(problem, _KEYS, tensors):
        return False
    if chosen.specialised:
        return True
    if signs_pay and not keeps_signs(problem) and not problem.settings.causal:
        # Six products take less time than seven, and the plain kernels make signs for less.
        return False
    heads = min(problem.q.shape[1], problem.k.shape[1])
    shortest = min(problem.settings.max_q, problem.settings.max_k)
    enough = items_of(problem, heads, shortest, _SIDE) >= processors(problem.q.device)
    return at_home(problem.q) and enough and shortest >= _FROM


def keeps_signs(problem: Problem) -> bool:
    """Whether the specialised kernels are faster with signs than with scores made again."""
    return problem.q.shape[-1] > 64


def keys_launch(
    problem: Problem, level: int, grad_out: Tensor, dk: Tensor, dv: Tensor, *, signs: bool
) -> Launch:
    """The launch for dk and dv, called with the kernel's tensors."""
    from reluformer.ops.backends.triton.hopper.backward_dkv import specialised_keys_kernel

    q, k, v = problem.q, problem.k, problem.v
    tiled = [(each, _SIDE) for each in (q, k, v, grad_out, dk, dv)]
    return _launch(
        specialised_keys_kernel, problem, _KEYS[q.shape[-1]], tiled, k.shape[1], problem.settings.max_k,
        level, signs=signs,
    )  # fmt: skip


def queries_launch(
    problem: Problem, level: int, grad_out: Tensor, dq: Tensor, *, signs: bool
) -> Launch:
    """The launch for dq, called with the kernel's tensors."""
    from reluformer.ops.backends.triton.hopper.backward_dq import specialised_queries_kernel

    q, k, v = problem.q, problem.k, problem.v
    tiled = [(each, _SIDE) for each in (q, k, v, grad_out, dq)]
    return _launch(
        specialised_queries_kernel, problem, (_SIGNED if signs else _QUERIES)[q.shape[-1]], tiled,
        q.shape[1], problem.settings.max_q, level, signs=signs,
    )  # fmt: skip


def _launch(
    kernel: Any,
    problem: Problem,
    buffers: Buffers,
    tiled: list[tuple[Tensor, int]],
    heads: int,
    length: int,
    level: int,
    *,
    signs: bool,
) -> Launch:
    """Of a kernel that owns tiles of a sequence of that length for each of its heads."""
    items = items_of(problem, heads, length, _SIDE)
    padded = triton.cdiv(problem.settings.max_q, BLOCK.value) * BLOCK.value
    key_blocks = triton.cdiv(problem.settings.max_k, WIDEST.value) * (WIDEST.value // _SIDE)
    # That dO comes with the factors of its rows is what `prescale` means.
    tile = tuning.Tile(_SIDE, _SIDE, 4, buffers.stages, prescale=True)
    shared = {**tile_config(problem, tile)._asdict(), "num_warps": 4}
    shared |= {"PRESCALE": shared["SCALE_SCORES"]}
    named = ("GROUP", "D", "CAUSAL", "POWER", "HAS_THRESHOLD", "PRESCALE", "num_warps")
    return SpecialisedLaunch(
        kernel,
        min(items, processors(problem.q.device)),
        (
            items, heads, tiles_of(length, _SIDE), problem.settings.max_q, problem.settings.max_k, key_blocks,
            padded // _SIDE * key_blocks, padded, problem.settings.scale, problem.unit,
            problem.settings.threshold_value, problem.settings.length_exponent,
        ),
        {
            **{name: shared[name] for name in named},
            "ROWS": _SIDE,
            "SIDE": _SIDE,
            "STAGES": buffers.stages,
            "IN_REGISTERS": buffers.in_registers,
            "GRADS": level == 1,
            "ROW_SCALE": problem.has_row_factors,
            "SIGNS": signs,
        },
        tiled,
    )  # fmt: skip
