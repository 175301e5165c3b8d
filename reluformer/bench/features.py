"""What the options of our fused kernels cost, beside the plain call."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from reluformer.bench.cases import Case
from reluformer.bench.contestants import Contestant, Options, Run
from reluformer.model.config import AttentionConfig
from reluformer.ops.api import relu_attention
from reluformer.ops.backends import fused

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
        _sampled(case),
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
        _feature("power four", case, lambda batch, heads: {"power": 4}),
        _as_in_models(case),
        _feature("window of a quarter", case, lambda batch, heads: {"window": n // 4}),
        replace(
            _feature("dropout", case),
            run=_kernel(case, {"dropout_p": 0.1}),
            without_chance=_kernel(case, {"dropout_p": _NEVER}),
        ),
        _packed("packed", case),
        _packed("packed and ragged, for the same work", case, cuts=_cuts(case)),
    ]
    return {each.name: each for each in found}


def _feature(
    name: str, case: Case, options: Options = lambda batch, heads: {}, statistics: int = 0
) -> Contestant:
    run = _kernel(case, {**options(case.batch, case.heads), "statistics": statistics})
    return Contestant(
        name, "relu", run, case, _on_triton(case), options=options, statistics=statistics
    )


def _sampled(case: Case) -> Contestant:
    """Row sums, and the entropies of one block of rows in eight."""
    run = _kernel(case, {"statistics": 2, "entropy_every": 8})
    reason = None if _on_triton(case) else "the cpu implementation makes all entropies"
    return Contestant(
        "row sums, one entropy in 8", "relu", run, case, _on_triton(case), statistics=2,
        entropy_every=8, absent=reason,
    )  # fmt: skip


def _as_in_models(case: Case) -> Contestant:
    """The attention that models have by default, row sums for their loss included."""
    config = AttentionConfig()

    def options(batch: int, heads: int) -> dict[str, Any]:
        threshold = torch.full((heads,), config.first_threshold, device=case.device)
        return {**config.fixed_options, "threshold": threshold}

    settings = options(case.batch, case.heads)
    impl = "triton" if _on_triton(case) else "cpu"

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        found = relu_attention(
            q, k, v, causal=case.causal, impl=impl, return_sums="row_sum", **settings
        )
        return found.output, found.sums.row_sum

    return Contestant(
        "as in the models", "relu", run, case, _on_triton(case), options=options, statistics=1
    )


def _on_triton(case: Case) -> bool:
    """Whether the Triton kernels run the case; else the cpu implementation does."""
    from reluformer.ops.backends.triton.op import supports

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


def _cuts(case: Case) -> list[int]:
    """Where each sequence is cut so that lengths are spread evenly over 0 to n."""
    return [case.keys * (2 * row + 1) // (2 * case.batch) for row in range(case.batch)]


def _packed(name: str, case: Case, cuts: Sequence[int] = ()) -> Contestant:
    """The same tokens without a batch dimension; with `cuts` [B], sequences of two that meet there.

    Padded to their longest, those would be nearly half padding. They are less work than the plain
    call: the squares of their lengths.
    """
    settings, n = _settings(case), case.keys
    del settings["key_lengths"], settings["mask"]
    borders = {row * n for row in range(case.batch + 1)}
    borders |= {row * n + cut for row, cut in enumerate(cuts)}
    ends = torch.tensor(sorted(borders), device=case.device, dtype=torch.int32)
    lengths = [end - start for start, end in pairwise(sorted(borders))]
    longest, work = max(lengths), sum(each**2 for each in lengths) / (case.batch * n**2)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        from reluformer.ops.backends.triton.op import rectified_attention_varlen

        q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
        out, *_ = rectified_attention_varlen(q, k, v, ends, ends, longest, longest, **settings)
        return (out.view(case.batch, case.queries, *out.shape[1:]).transpose(1, 2),)

    def options(batch: int, heads: int) -> dict[str, Any]:
        # Asked for the first and the last sequence.
        if not cuts:
            return {}
        at = torch.arange(n, device=case.device)
        side = at < torch.tensor([[cuts[0]], [cuts[-1]]], device=case.device)
        return {"mask": (side[:, :, None] == side[:, None, :]).unsqueeze(1)}

    on_triton = _on_triton(case)
    reason = None if on_triton else "the cpu implementation takes no packed sequences"
    return Contestant(name, "relu", run, case, on_triton, options, absent=reason, work=work)
