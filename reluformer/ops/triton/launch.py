"""Host side of the kernels: outputs, strides, compile-time switches, grids."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from reluformer.ops.triton import tiles
from reluformer.ops.triton.backward import keys_kernel, queries_kernel, scale_rows_kernel
from reluformer.ops.triton.forward import forward_kernel
from reluformer.ops.triton.layout import empty_heads, row_values


@dataclass(frozen=True)
class Problem:
    """One call: dense tensors [B, H, T, D] or, with `cu_q`, packed ones seen as [1, H, N, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    gamma: Tensor | None
    threshold: Tensor | None
    key_lengths: Tensor | None
    mask: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    seed: Tensor | None
    scale: float
    gamma_value: float
    threshold_value: float
    length_exponent: float
    power: int
    causal: bool
    window: int
    dropout_p: float
    max_q: int
    max_k: int

    @property
    def sequences(self) -> int:
        """How many sequences there are, packed or padded."""
        return self.q.shape[0] if self.cu_q is None else self.cu_q.shape[0] - 1

    @property
    def prescaled_scores(self) -> bool:
        """float16 cannot hold unscaled products; the other types need no multiplication there."""
        return self.q.dtype == torch.float16

    @property
    def unit(self) -> float:
        """What C_i is for (n_i / 2)^length_exponent = 1 and no gamma tensor."""
        scale = 1.0 if self.prescaled_scores else self.scale**self.power
        return scale / self.gamma_value

    @property
    def per_row(self) -> bool:
        """Whether C_i differs between the rows that one key meets."""
        grouped = self.q.shape[1] != self.k.shape[1]
        varies = self.causal or self.window > 0 or self.mask is not None
        return varies or (grouped and self.gamma is not None)


def run(kernel: Any, programs: int, args: list[Any], **options: Any) -> None:
    """Launch on a grid of one dimension (others are limited to 65535 programs)."""
    kernel[(programs,)](*args, **options)


def _interpreting() -> bool:
    return bool(triton.knobs.runtime.interpret)


def _precision(dtype: torch.dtype) -> str:
    # float32 follows torch's own switch; three tf32 products keep float32 accuracy.
    if dtype != torch.float32 or _interpreting():
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _pad(width: int) -> int:
    return int(triton.next_power_of_2(width))


def _describable(tensor: Tensor) -> bool:
    """Whether a tensor-memory descriptor can address it: 16-byte steps, every dimension real."""
    itemsize = tensor.element_size()
    if tensor.data_ptr() % 16 or tensor.stride(-1) != 1 or tensor.numel() == 0:
        return False
    return all(
        size == 1 or (0 < step * itemsize < 1 << 40 and step * itemsize % 16 == 0)
        for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )


def _use_tma(*tensors: Tensor) -> bool:
    forced = tiles.forced_tma()
    # Three-product float32 keeps its operands in registers; descriptors only make it spill.
    if forced is None and tensors[0].element_size() != 2:
        return False
    if forced is False or not all(_describable(tensor) for tensor in tensors):
        return False
    if forced or not tensors[0].is_cuda:
        return bool(forced)
    return torch.version.hip is None and torch.cuda.get_device_capability(tensors[0].device)[0] >= 9


def _tile_source(tensor: Tensor, rows: int, tma: bool) -> Any:
    """The tensor, or its descriptor with tiles of `rows` x padded width."""
    if not tma:
        return tensor
    width = tensor.shape[-1]
    # The step of a dimension of size one is free: give it a legal one.
    strides = [
        width * 16 if size == 1 and at < 3 else step
        for at, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
    return TensorDescriptor(tensor, list(tensor.shape), strides, [1, 1, rows, _pad(width)])


def _steps(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride()[:-1]


def _mask_source(problem: Problem) -> tuple[Tensor, tuple[int, ...]]:
    """Mask bytes and their strides over [B, H, Tq, Tk], zero where it is broadcast."""
    if problem.mask is None:
        return problem.q, (0, 0, 0, 0)
    shape = (problem.sequences, problem.q.shape[1], problem.max_q, problem.max_k)
    spread = problem.mask.view(torch.uint8).expand(shape)
    return spread, spread.stride()


def _stat_steps(problem: Problem) -> tuple[int, int, int]:
    """Strides over (batch, head, row): [B, H, Tq] dense, [N, H] packed."""
    heads, rows = problem.q.shape[1], problem.q.shape[2]
    return (0, 1, heads) if problem.cu_q is not None else (heads * rows, rows, 1)


def _switches(problem: Problem, tile: tiles.Tile) -> dict[str, Any]:
    q, k, v = problem.q, problem.k, problem.v
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "D": q.shape[-1],
        "DV": v.shape[-1],
        "D_PAD": _pad(q.shape[-1]),
        "DV_PAD": _pad(v.shape[-1]),
        "POWER": problem.power,
        "CAUSAL": problem.causal,
        "WINDOW": problem.window > 0,
        "HAS_LENGTHS": problem.key_lengths is not None,
        "HAS_MASK": problem.mask is not None,
        "VARLEN": problem.cu_q is not None,
        "HAS_GAMMA": problem.gamma is not None,
        "HAS_THRESHOLD": problem.threshold is not None or problem.threshold_value != 0.0,
        "THRESHOLD_TENSOR": problem.threshold is not None,
        "PRESCALE": problem.prescaled_scores,
        "DROPOUT": problem.dropout_p > 0.0,
        "ONE_LOOP": tile.one_loop,
        "PTX": q.is_cuda and torch.version.hip is None and not _interpreting(),
        "PRECISION": _precision(q.dtype),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _pick(kernel: tiles.Kernel, problem: Problem) -> tiles.Tile:
    width = max(_pad(problem.q.shape[-1]), _pad(problem.v.shape[-1]))
    edged = problem.per_row or problem.key_lengths is not None or problem.dropout_p > 0
    return tiles.pick(kernel, width, edged, problem.max_k, problem.q.element_size())


def _or(tensor: Tensor | None, dummy: Tensor) -> Tensor:
    """A pointer for an argument that the compiled kernel does not read."""
    return dummy if tensor is None else tensor


def _optional(problem: Problem) -> list[Any]:
    """gamma, threshold, lengths, mask, cu_q, cu_k, seed as the kernels take them."""
    mask, _ = _mask_source(problem)
    q = problem.q
    return [
        _or(problem.gamma, q),
        _or(problem.threshold, q),
        _or(problem.key_lengths, q),
        mask,
        _or(problem.cu_q, q),
        _or(problem.cu_k, q),
        _or(problem.seed, q),
    ]


def _numbers(problem: Problem) -> list[Any]:
    return [
        problem.q.shape[1],
        problem.max_q,
        problem.max_k,
        problem.window,
        problem.scale,
        problem.unit,
        problem.threshold_value,
        problem.length_exponent,
        problem.dropout_p,
    ]


def forward(problem: Problem, statistics: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output, row sums, sums of w log w, visible counts); what was not asked for is empty."""
    q, k, v = problem.q, problem.k, problem.v
    packed = problem.cu_q is not None
    out = empty_heads(q, v.shape[-1], zero=packed)
    row_sum, log_sum = (row_values(q, packed=packed, wanted=statistics) for _ in range(2))
    count = row_values(q, packed=packed, wanted=problem.mask is not None)
    if out.numel() == 0:
        return out, row_sum, log_sum, count
    if k.numel() == 0:
        return out.zero_(), row_sum.zero_(), log_sum.zero_(), count.zero_()
    tile = _pick("forward", problem)
    tma = _use_tma(q, k, v, out)
    args = [
        _tile_source(q, tile.queries, tma),
        _tile_source(k, tile.keys, tma),
        _tile_source(v, tile.keys, tma),
        _tile_source(out, tile.queries, tma and not packed),
        row_sum,
        log_sum,
        count,
        *_optional(problem),
        *(step for tensor in (q, k, v, out) for step in _steps(tensor)),
        *_mask_source(problem)[1],
        *_stat_steps(problem),
        *_numbers(problem),
    ]
    programs = triton.cdiv(problem.max_q, tile.queries) * problem.sequences * q.shape[1]
    run(
        forward_kernel,
        programs,
        args,
        STATISTICS=statistics,
        TMA=tma,
        **_switches(problem, tile),
    )
    return out, row_sum, log_sum, count


@dataclass(frozen=True)
class Gradients:
    """What arrives at the outputs, and what of the forward pass the backward needs."""

    out: Tensor | None
    count: Tensor
    grad_out: Tensor
    grad_sum: Tensor | None
    grad_log: Tensor | None

    @property
    def level(self) -> int:
        """0: output only, 1: and row sums, 2: and sums of w log w."""
        return 2 if self.grad_log is not None else int(self.grad_sum is not None)


def backward(
    problem: Problem, grads: Gradients, need_shift: bool, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, O.dO per row, sum of dS per row); the last two are empty unless needed."""
    q, k, v = problem.q, problem.k, problem.v
    packed = problem.cu_q is not None
    dk, dv = empty_heads(k, k.shape[-1], zero=packed), empty_heads(v, v.shape[-1], zero=packed)
    row_dot = row_values(q, packed=packed, wanted=grads.out is not None)
    row_shift = row_values(q, packed=packed, wanted=need_shift)
    if q.numel() == 0 or k.numel() == 0:
        dq = empty_heads(q, q.shape[-1], zero=True)
        return dq, dk.zero_(), dv.zero_(), row_dot.zero_(), row_shift.zero_()
    fused = not deterministic and not need_shift and grads.out is None
    if fused:
        dq = key_gradients(problem, grads, dk, dv, fused=True)
    else:
        dq = empty_heads(q, q.shape[-1], zero=packed)
        key_gradients(problem, grads, dk, dv, fused=False)
        query_gradients(problem, grads, dq, row_dot, row_shift)
    return dq, dk, dv, row_dot, row_shift


def key_gradients(
    problem: Problem, grads: Gradients, dk: Tensor, dv: Tensor, *, fused: bool
) -> Tensor:
    """Fill dk and dv; returns dq if `fused`."""
    q, k, v, grad_out = problem.q, problem.k, problem.v, grads.grad_out
    packed = problem.cu_q is not None
    tile = _pick("fused" if fused else "keys", problem)
    # float16 would lose small gradients in the extra rounding.
    prescaled = tile.prescale and problem.per_row and q.dtype != torch.float16
    if prescaled:
        scaled = empty_heads(grad_out, grad_out.shape[-1], zero=packed)
        _scale_rows(problem, grads, grad_out, scaled, problem.unit, factor=True)
        grad_out = scaled
    tma = _use_tma(q, k, v, grad_out, dk, dv)
    share = q.new_zeros(q.shape, dtype=torch.float32) if fused else q
    args = [
        _tile_source(q, tile.queries, tma),
        _tile_source(k, tile.keys, tma),
        _tile_source(v, tile.keys, tma),
        _tile_source(grad_out, tile.queries, tma),
        _or(grads.grad_sum, q),
        _or(grads.grad_log, q),
        grads.count,
        share,
        _tile_source(dk, tile.keys, tma and not packed),
        _tile_source(dv, tile.keys, tma and not packed),
        *_optional(problem),
        *(step for tensor in (q, k, v, grad_out, share, dk, dv) for step in _steps(tensor)),
        *_mask_source(problem)[1],
        *_stat_steps(problem),
        *_numbers(problem),
    ]
    run(
        keys_kernel,
        triton.cdiv(problem.max_k, tile.keys) * problem.sequences * k.shape[1],
        args,
        GRADS=grads.level,
        ROW_SCALE=problem.per_row,
        PRESCALED=prescaled,
        FUSED=fused,
        TMA=tma,
        **_switches(problem, tile),
    )
    if not fused:
        return share
    # The loop left out what is the same for all terms of a row.
    unit = problem.power * (problem.scale if problem.prescaled_scores else 1.0)
    if not problem.per_row:
        unit *= problem.unit
    dq = empty_heads(q, q.shape[-1], zero=packed)
    _scale_rows(problem, grads, share, dq, unit, factor=not problem.per_row)
    return dq


def query_gradients(
    problem: Problem, grads: Gradients, dq: Tensor, row_dot: Tensor, row_shift: Tensor
) -> None:
    """Fill dq and, unless empty, the two sums per row."""
    q, k, v, grad_out = problem.q, problem.k, problem.v, grads.grad_out
    out = _or(grads.out, grad_out)
    tile = _pick("queries", problem)
    tma = _use_tma(q, k, v, grad_out, dq)
    args = [
        _tile_source(q, tile.queries, tma),
        _tile_source(k, tile.keys, tma),
        _tile_source(v, tile.keys, tma),
        out,
        _tile_source(grad_out, tile.queries, tma),
        _or(grads.grad_sum, q),
        _or(grads.grad_log, q),
        grads.count,
        _tile_source(dq, tile.queries, tma and problem.cu_q is None),
        row_dot,
        row_shift,
        *_optional(problem),
        *(step for tensor in (q, k, v, out, grad_out, dq) for step in _steps(tensor)),
        *_mask_source(problem)[1],
        *_stat_steps(problem),
        *_numbers(problem),
    ]
    run(
        queries_kernel,
        triton.cdiv(problem.max_q, tile.queries) * problem.sequences * q.shape[1],
        args,
        GRADS=grads.level,
        ROW_DOT=grads.out is not None,
        ROW_SHIFT=row_shift.numel() > 0,
        TMA=tma,
        **_switches(problem, tile),
    )


def _scale_rows(
    problem: Problem, grads: Gradients, src: Tensor, dst: Tensor, unit: float, *, factor: bool
) -> None:
    rows = 64
    args = [
        src,
        dst,
        grads.count,
        _or(problem.gamma, src),
        _or(problem.key_lengths, src),
        _or(problem.cu_q, src),
        _or(problem.cu_k, src),
        *_steps(src),
        *_steps(dst),
        *_stat_steps(problem),
        problem.q.shape[1],
        problem.max_q,
        problem.max_k,
        problem.window,
        unit,
        problem.length_exponent,
    ]
    run(
        scale_rows_kernel,
        triton.cdiv(problem.max_q, rows) * problem.sequences * problem.q.shape[1],
        args,
        ROWS=rows,
        D=src.shape[-1],
        D_PAD=_pad(src.shape[-1]),
        CAUSAL=problem.causal,
        WINDOW=problem.window > 0,
        HAS_LENGTHS=problem.key_lengths is not None,
        HAS_MASK=problem.mask is not None,
        VARLEN=problem.cu_q is not None,
        HAS_GAMMA=problem.gamma is not None,
        FACTOR=factor,
        num_warps=4,
    )
