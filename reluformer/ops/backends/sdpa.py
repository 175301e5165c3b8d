"""Softmax attention through torch's fused kernels, the strongest baseline for comparisons."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from reluformer.errors import UserError
from reluformer.ops import hidden
from reluformer.ops.backends import reference
from reluformer.ops.backends.torch_state import is_untraced, needs_grad, prefers_onednn
from reluformer.ops.call import AttentionResult, Call
from reluformer.ops.definition import Attention

# cuDNN builds a plan for every new shape, which takes up to half a second.
_WITHOUT_PLANS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Scores of a head from which on SDPA is faster than the reference with oneDNN's float32 products.
_ONEDNN_SCORES = 1 << 17


def why_not(attention: Attention, call: Call) -> str | None:
    """One clause that says why this call cannot run here, or None if it can."""
    if attention.name != "softmax":
        return "torch's fused kernels compute softmax only"
    if call.return_weights or call.return_stats or call.return_sums:
        return "torch's fused kernels return neither weights nor statistics"
    return None


def is_slow(call: Call) -> bool:
    """Whether the reference is faster: a CPU whose float32 products oneDNN computes, short rows.

    SDPA asks oneDNN for one small product after the other, which costs more than they take.
    """
    if call.q.device.type != "cpu" or call.q.dtype != torch.float32 or not is_untraced(call.q):
        return False
    return call.q.shape[2] * call.k.shape[2] < _ONEDNN_SCORES and prefers_onednn()


def run(attention: Attention, call: Call, options: Mapping[str, Any]) -> AttentionResult:
    """`torch.nn.functional.scaled_dot_product_attention` with our masks and empty rows.

    Gradients can be differentiated again: then they are recomputed by the reference.
    """
    if not (is_untraced(call.q) and needs_grad(call.q, call.k, call.v, call.bias)):
        return _run(call)
    branch = _Branch(attention, call, options)
    q, k, v, bias = _Inputs.apply(branch, call.q, call.k, call.v, call.bias)  # type: ignore[no-untyped-call]
    result = _run(call._replace(q=q, k=k, v=v, bias=bias))
    return result._replace(output=_Output.apply(branch, result.output))  # type: ignore[no-untyped-call]


class _Branch:
    """A call without its tensors and, while gradients are differentiated again, the output's."""

    def __init__(self, attention: Attention, call: Call, options: Mapping[str, Any]) -> None:
        self.attention, self.options = attention, options
        self.visibility, self.scale, self.dropout_p = call.visibility, call.scale, call.dropout_p
        self.gradient: Tensor | None = None

    def recompute(self, gradient: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
        """Differentiable gradients of q, k, v and bias."""
        if self.dropout_p > 0:
            raise UserError(
                "second derivatives of softmax attention with dropout need impl='reference'"
            )
        # A gradient must not flow from one input to another that it was computed from.
        inputs: list[Any] = [t if t is None else t.view_as(t) for t in saved]
        q, k, v, bias = inputs
        call = Call(q, k, v, self.visibility, self.scale, bias)
        output = reference.run(self.attention, call, self.options).output
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        gradients = iter(torch.autograd.grad(output, wanted, gradient, create_graph=True))
        return tuple(next(gradients) if t is not None and t.requires_grad else None for t in inputs)


class _Inputs(torch.autograd.Function):
    """q, k, v and bias as they are; their gradients, if differentiated again, are recomputed."""

    @staticmethod
    def forward(ctx: Any, branch: _Branch, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.branch = branch
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return tuple(t if t is None else t.view_as(t) for t in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # The gradient's graph leads back to the branch, which must not keep it.
        gradient, ctx.branch.gradient = ctx.branch.gradient, None
        if gradient is not None:
            return None, *ctx.branch.recompute(gradient, *ctx.saved_tensors)
        return None, *grads


class _Output(torch.autograd.Function):
    """The output as it is; its gradient is kept for `_Inputs` if it is differentiated again."""

    @staticmethod
    def forward(ctx: Any, branch: _Branch, output: Tensor) -> Tensor:
        ctx.branch = branch
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        if torch.is_grad_enabled():
            ctx.branch.gradient = grad
        return None, grad


def _screened(call: Call) -> tuple[Call, Tensor | None]:
    """The call with 0 for hidden non-finite numbers, and NaN for rows that see such numbers.

    Where numbers cannot be read without synchronisation, only key lengths are taken into account.
    """
    q, k, v, rules = call.q, call.k, call.v, call.visibility
    if not rules.hides_keys and call.bias is None:
        return call, None
    if q.device.type == "cpu" and is_untraced(q) and is_untraced(k) and is_untraced(v):
        if not hidden.has_nonfinite(k, v):
            return call, None
        rules = reference.bias_as_mask(call).visibility
        visible = rules.table(q.shape[2], k.shape[2], q.device)
        if visible is None:
            return call, None
        bad_keys = hidden.nan_keys(k).transpose(-1, -2)
        k, v, both = hidden.finite(k), hidden.finite(v), v + bad_keys
        both = both.repeat_interleave(call.groups, dim=1)
        return call._replace(k=k, v=v), hidden.nan_where_seen(visible, both).to(q.dtype)
    if rules.key_lengths is not None:
        key = torch.arange(k.shape[2], device=k.device)
        is_padding = (key >= rules.key_lengths[:, None])[:, None, :, None]
        return call._replace(k=k.masked_fill(is_padding, 0), v=v.masked_fill(is_padding, 0)), None
    return call, None


def _run(call: Call) -> AttentionResult:
    call, seen_nan = _screened(call)
    rows, keys = call.q.shape[2], call.k.shape[2]
    rules = call.visibility
    # torch aligns `is_causal` to the start, this library to the end: equal for square maps only.
    plainly_causal = rules.only_causal and call.bias is None and _equal(rows, keys)
    visible = None if plainly_causal else rules.table(rows, keys, call.q.device)
    mask, empty = visible, None
    # A row that sees no key would be NaN: it sees all keys, and its output is set to zero.
    if visible is not None:
        empty = ~visible.any(dim=-1, keepdim=True)
        mask = visible | empty
    if call.bias is not None:
        mask = call.bias if mask is None else torch.where(mask, call.bias, -torch.inf)
        mask = mask.to(call.q.dtype)
        if hidden.may_be_nonfinite(call.bias):
            without_key = (mask == -torch.inf).all(dim=-1, keepdim=True)
            mask = mask.masked_fill(without_key, 0.0)
            empty = without_key if empty is None else empty | without_key
    if mask is not None:
        # torch takes no mask of fewer than two dimensions, and copies one for each head if it has
        # a dimension for them.
        mask = mask.expand(*mask.shape[:-2], rows, keys)
    with _kernels(call):
        output = functional.scaled_dot_product_attention(
            call.q,
            call.k,
            call.v,
            attn_mask=mask,
            dropout_p=call.dropout_p,
            is_causal=plainly_causal,
            scale=call.scale,
            enable_gqa=not _equal(call.q.shape[1], call.k.shape[1]),
        )
    if seen_nan is not None:
        output = output + seen_nan
    if empty is not None:
        output = output.masked_fill(empty, 0.0)
    return AttentionResult(output, None, None)


def _equal(size: int, other: int) -> bool:
    """Whether two sizes are equal; in a graph of dynamic sizes, whether they always are."""
    if not torch.compiler.is_compiling():
        return size == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    # A comparison would be a symbol, or restrict the graph to the sizes of the example.
    return statically_known_true(size == other)


def _kernels(call: Call) -> AbstractContextManager[Any]:
    """Context that leaves out cuDNN during generation, where the KV length changes every step."""
    # `torch.compile` does not trace the question whether inference mode is on.
    if call.q.is_cuda and is_untraced(call.q) and torch.is_inference_mode_enabled():
        return sdpa_kernel(_WITHOUT_PLANS)
    return nullcontext()
