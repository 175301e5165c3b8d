"""Who takes part: our implementations, and the kernels that others offer on this machine."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reluformer.bench.cases import Case
from reluformer.ops import attention
from reluformer.ops.backends.registry import BACKENDS

Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
Options = Callable[[int, int], dict[str, Any]]

# SDPA's backends that compute softmax attention without a table of weights.
_SDPA = {
    "SDPA-flash": SDPBackend.FLASH_ATTENTION,
    "SDPA-cuDNN": SDPBackend.CUDNN_ATTENTION,
}

# Scores of the largest case for an eager contestant, and for one that searches its thresholds,
# which takes thirty passes over them.
_EAGER = {"cuda": 1 << 29, "cpu": 1 << 25}
_SEARCHING = {"cuda": 1 << 28, "cpu": 1 << 22}
_SEARCHED = ("sparsemax", "entmax15")

# FlexAttention compiles anew for each length: it takes part at one.
_FLEX_LENGTH = 4096

# The published trick adds an offset inside the logarithm and subtracts its share afterwards, 1 by
# default. Of so large a share little but rounding errors is left where weights are sparse; this one
# loses nothing, and costs as much.
_LOG_OFFSET = 1e-5


def _no_options(batch: int, heads: int) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Contestant:
    """One way to compute one attention on a case."""

    name: str
    kind: str
    """The attention, by its name in the family: whose formula it must match."""
    run: Run
    """q, k, v to the output [B, H, Tq, D], and statistics [B, H, Tq] if asked for."""
    case: Case
    compiled: bool = False
    """Whether its first call compiles, which is better done in parallel beforehand."""
    options: Options = _no_options
    """Keywords of the attention, for a batch and a number of heads."""
    statistics: int = 0
    """As the fused kernels count them: 1 for row sums, 2 for sums of w log w too."""
    entropy_every: int = 1
    """Of so many blocks of query rows one has its sums of w log w made; the others' are 0."""
    without_chance: Run | None = None
    """What is compared with float64 where `run` is random."""
    absent: str | None = None
    """Why it cannot take part, where that is known without trying."""
    work: float = 1.0
    """Its work as a share of the case's."""


def contestants(case: Case) -> dict[str, Contestant]:
    """Everybody by name, ours first; who cannot take part is there with the reason."""
    if case.group == "features":
        from reluformer.bench.features import features

        return features(case)
    pairs = [("relu", impl) for impl in BACKENDS if impl != "sdpa"]
    pairs += [("softmax", "sdpa")]
    pairs += [(kind, "reference") for kind in ("softmax", *_SEARCHED)]
    found = [_ours(case, kind, impl) for kind, impl in pairs]
    for name, backend in _SDPA.items():
        found.append(Contestant(name, "softmax", partial(_sdpa, backend, case.causal), case))
    for name, kind in (("FlexAttention", "softmax"), ("FlexAttention, log of ReLU", "relu")):
        run = partial(_flex, kind, case.causal, case.device)
        reason = _flex_why_not(case)
        found.append(Contestant(name, kind, run, case, compiled=True, absent=reason))
    return {each.name: each for each in found}


def _ours(case: Case, kind: str, impl: str) -> Contestant:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (attention(kind, q, k, v, causal=case.causal, impl=impl),)

    reason = None
    limit = (_SEARCHING if kind in _SEARCHED else _EAGER)[case.device]
    if impl == "reference" and case.scores > limit:
        reason = "its tables of scores would be too large or slow"
    return Contestant(f"{kind} {impl}", kind, run, case, compiled=impl == "triton", absent=reason)


def _sdpa(backend: SDPBackend, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(backend):
        return (scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped),)


def _flex_why_not(case: Case) -> str | None:
    if case.device != "cuda":
        return "FlexAttention has no backward on a CPU"
    if case.group != "dense" or case.keys != _FLEX_LENGTH:
        return f"compiled for dense cases at n {_FLEX_LENGTH} only"
    return None


def _flex(
    kind: str, causal: bool, device: str, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    return _flex_compiled(kind, causal, device)(q, k, v)


@cache
def _flex_compiled(kind: str, causal: bool, device: str) -> Run:
    """FlexAttention; cached, because another function would be compiled again."""
    # Silently running without compilation would be worse than refusing.
    torch._dynamo.config.recompile_limit = 64
    make = {"softmax": flex_softmax, "relu": flex_log_of_relu}[kind]
    return keeping_graph(torch.compile(make(causal, device), fullgraph=True, dynamic=False))


def keeping_graph(compiled: Run) -> Run:
    """A compiled function whose backward can be run again and again, as the timing of one does.

    For that its code may not reuse the memory of what its forward saved. The setting counts when
    the forward is compiled, and again whenever the backward runs: in a thread of autograd's own,
    where settings of other threads need not be known.
    """
    from torch._functorch import config

    def forbid_here(grad: Tensor) -> None:
        config.donated_buffer = False

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        with config.patch(donated_buffer=False):
            outputs = compiled(q, k, v)
        for each in outputs:
            if each.requires_grad:
                each.register_hook(forbid_here)  # type: ignore[no-untyped-call]
        return outputs

    return run


def flex_softmax(causal: bool, device: str, length: int = _FLEX_LENGTH) -> Run:
    """Softmax attention by FlexAttention, not yet compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = _block_mask(causal, device, length)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (flex_attention(q, k, v, block_mask=mask),)

    return run


def flex_log_of_relu(
    causal: bool, device: str, length: int = _FLEX_LENGTH, offset: float = _LOG_OFFSET
) -> Run:
    """ReLU attention by FlexAttention and the published trick, not yet compiled.

    The softmax of log(ReLU(s) + c) is (ReLU(s) + c) / l with l = exp(lse), so its output times l,
    less c times the sum of the visible values, is ReLU(s) V. (attention-gym, mods/activation.py;
    here the sums are in float32, which favours it.)
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

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


def _block_mask(causal: bool, device: str, length: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    if not causal:
        return None

    def past(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return row >= key

    return create_block_mask(past, None, None, length, length, device=device)
