"""FlexAttention as a softmax kernel and, with a score modification, as a ReLU kernel."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from reluformer.bench.cases import Case
from reluformer.bench.contestant import Contestant, Run

# FlexAttention compiles anew for each length, so it runs at one length only.
_LENGTH = 4096

# The published ReLU modification adds an offset inside the logarithm and subtracts its share from
# the output. Its default of 1 leaves mostly rounding errors where weights are sparse. This offset
# loses no accuracy at the same cost.
_LOG_OFFSET = 1e-5


def flex_contestants(case: Case) -> list[Contestant]:
    """FlexAttention for softmax and for ReLU attention."""
    kinds = {"FlexAttention": "softmax", "FlexAttention, log of ReLU": "relu"}
    return [
        Contestant(
            name,
            kind,
            partial(_run, kind, case.causal, case.device),
            case,
            is_compiled=True,
            absent=_why_not(case),
        )
        for name, kind in kinds.items()
    ]


def flex_softmax(causal: bool, device: str, length: int = _LENGTH) -> Run:
    """Softmax attention by FlexAttention, not compiled yet."""
    mask = _block_mask(causal, device, length)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (flex_attention(q, k, v, block_mask=mask),)

    return run


def flex_log_of_relu(
    causal: bool, device: str, length: int = _LENGTH, offset: float = _LOG_OFFSET
) -> Run:
    """ReLU attention by FlexAttention, not compiled yet.

    The softmax of log(ReLU(s) + c) is (ReLU(s) + c) / l with l = exp(lse). Its output times l, less
    c times the sum of the visible values, is ReLU(s) V. The modification is published in
    attention-gym (mods/activation.py); here the sums are float32, which makes it more accurate.
    """
    mask = _block_mask(causal, device, length)

    def log_of_relu(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return torch.log(torch.relu(score) + offset)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out, aux = flex_attention(
            q, k, v, score_mod=log_of_relu, block_mask=mask, return_aux=AuxRequest(lse=True)
        )
        assert aux.lse is not None
        values = v.float()
        total = values.cumsum(-2) if causal else values.sum(-2, keepdim=True)
        weighted = out.float() * aux.lse.exp().unsqueeze(-1) - offset * total
        n = torch.arange(1, length + 1, device=q.device).unsqueeze(-1) if causal else length
        return ((weighted / (n / 2) ** 0.5).to(q.dtype),)

    return run


def keep_graph(compiled: Run) -> Run:
    """Make the backward of a compiled function repeatable, as its timing requires.

    Compiled code may otherwise reuse the memory of saved tensors ("donated buffers"). The setting
    is read when the forward is compiled and again when the backward runs, in a thread of autograd
    that does not inherit settings; therefore a hook sets it there.
    """

    def disable_in_this_thread(grad: Tensor) -> None:
        functorch_config.donated_buffer = False

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        with functorch_config.patch(donated_buffer=False):
            outputs = compiled(q, k, v)
        for output in outputs:
            if output.requires_grad:
                output.register_hook(disable_in_this_thread)  # type: ignore[no-untyped-call]
        return outputs

    return run


def _why_not(case: Case) -> str | None:
    if case.device != "cuda":
        return "FlexAttention has no backward on a CPU"
    if case.group != "dense" or case.keys != _LENGTH:
        return f"compiled for dense cases at n {_LENGTH} only"
    return None


def _run(
    kind: str, causal: bool, device: str, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    return _compiled(kind, causal, device)(q, k, v)


@cache
def _compiled(kind: str, causal: bool, device: str) -> Run:
    """Compile once per setting; a new function object would be compiled again."""
    # Above the limit torch would silently run without compilation.
    torch._dynamo.config.recompile_limit = 64
    make: Callable[[bool, str], Run] = {"softmax": flex_softmax, "relu": flex_log_of_relu}[kind]
    return keep_graph(torch.compile(make(causal, device), fullgraph=True, dynamic=False))


def _block_mask(causal: bool, device: str, length: int) -> Any:
    if not causal:
        return None

    def past(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return row >= key

    return create_block_mask(past, None, None, length, length, device=device)
