"""What the options of our fused kernels cost, beside the plain call."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from reluformer.bench.cases import Case
from reluformer.bench.contestants import Contestant, Options, Run
from reluformer.ops import fused

PLAIN = "plain"
_GROUPS = 8

# So small a chance drops nothing, but takes the same path through the kernel.
_NEVER = 1e-9


def features(case: Case) -> dict[str, Contestant]:
    """The plain call and one contestant for each option."""
    device, n = case.device, case.keys
    grouped = replace(case, kv_heads=max(1, case.heads // _GROUPS))
    found = [
        _feature(PLAIN, case),
        _feature("row sums", case, statistics=1),
        _feature("row sums and entropy", case, statistics=2),
        _feature(f"{case.heads // grouped.kv_heads} query heads a key head", grouped),
        _feature(
            "key lengths",
            case,
            lambda batch, heads: {"key_lengths": torch.full((batch,), n, device=device)},
        ),
        _feature(
            "gamma per head", case, lambda batch, heads: {"gamma": torch.ones(heads, device=device)}
        ),
        _feature(
            "threshold per head",
            case,
            lambda batch, heads: {"threshold": torch.zeros(heads, device=device)},
        ),
        _feature("power two", case, lambda batch, heads: {"power": 2}),
        _feature("window of a quarter", case, lambda batch, heads: {"window": n // 4}),
        replace(
            _feature("dropout", case),
            run=_kernel(case, {"dropout_p": 0.1}),
            without_chance=_kernel(case, {"dropout_p": _NEVER}),
        ),
        _packed(case),
    ]
    return {each.name: each for each in found}


def _feature(
    name: str, case: Case, options: Options = lambda batch, heads: {}, statistics: int = 0
) -> Contestant:
    run = _kernel(case, {**options(case.batch, case.heads), "statistics": statistics})
    return Contestant(
        name, "relu", run, case, _on_triton(case), options=options, statistics=statistics
    )


def _on_triton(case: Case) -> bool:
    """Whether the Triton kernels run the case; else the cpu implementation does."""
    from reluformer.ops.triton.op import supports

    like = torch.empty(1, 1, 1, case.width, device=case.device, dtype=getattr(torch, case.dtype))
    return supports(like, like, like, scale=1.0, power=1) is None


def _settings(case: Case) -> dict[str, Any]:
    """A plain call of the fused kernels."""
    return {
        "scale": case.width**-0.5, "gamma": 1.0, "length_exponent": 0.5, "power": 1,
        "threshold": 0.0, "causal": case.causal, "window": None, "key_lengths": None,
        "mask": None, "dropout_p": 0.0, "statistics": 0,
    }  # fmt: skip


def _kernel(case: Case, change: dict[str, Any]) -> Run:
    settings = {**_settings(case), **change}
    kernel = fused.triton_kernel() if _on_triton(case) else fused.cpu_kernel()

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return tuple(each for each in kernel(q, k, v, **settings) if each is not None)

    return run


def _packed(case: Case) -> Contestant:
    """The same sequences without a batch dimension."""
    settings = _settings(case)
    del settings["key_lengths"], settings["mask"]
    ends = torch.arange(case.batch + 1, device=case.device, dtype=torch.int32) * case.keys

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        from reluformer.ops.triton.op import rectified_attention_varlen

        q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
        lengths = (ends, ends, case.queries, case.keys)
        out, *_ = rectified_attention_varlen(q, k, v, *lengths, **settings)
        return (out.view(case.batch, case.queries, *out.shape[1:]).transpose(1, 2),)

    reason = None if _on_triton(case) else "the cpu implementation takes no packed sequences"
    return Contestant("packed", "relu", run, case, _on_triton(case), absent=reason)
