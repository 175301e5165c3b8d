"""Options of the fused ReLU kernels, each timed beside the plain call."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from reluformer.bench.cases import Case
from reluformer.bench.contestant import Contestant, Options, Run
from reluformer.bench.rules import as_in_models, on_triton
from reluformer.model.config import AttentionConfig
from reluformer.ops.backends.cpu import op as cpu
from reluformer.ops.backends.triton import op as triton
from reluformer.ops.call import Call, Packing
from reluformer.ops.rule import Rectified
from reluformer.ops.stats import SumsLevel
from reluformer.ops.visibility import Visibility

PLAIN = "plain"
_GROUPS = 8
_LEVELS: tuple[SumsLevel | None, ...] = (None, "row_sum", "entropy")

# A dropout rate that drops no weight but takes the same path through the kernel.
_NO_DROPOUT = 1e-9


def features(case: Case) -> dict[str, Contestant]:
    """The plain call and one contestant for each option."""
    device, n = case.device, case.keys
    grouped = replace(case, kv_heads=max(1, case.heads // _GROUPS))
    contestants = [
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
        as_in_models("as in the models", case, AttentionConfig(), with_row_sums=True),
        _feature("window of a quarter", case, lambda batch, heads: {"window": n // 4}),
        replace(
            _feature("dropout", case),
            run=_kernel(case, {"dropout_p": 0.1}),
            deterministic_run=_kernel(case, {"dropout_p": _NO_DROPOUT}),
        ),
        _packed("packed", case),
        _packed("packed and ragged, for the same work", case, cuts=_cuts(case)),
    ]
    return {contestant.name: contestant for contestant in contestants}


def _feature(
    name: str, case: Case, options: Options = lambda batch, heads: {}, statistics: int = 0
) -> Contestant:
    """A call with one option."""
    run = _kernel(case, {**options(case.batch, case.heads), "return_sums": _LEVELS[statistics]})
    return Contestant(
        name, "relu", run, case, on_triton(case), options=options, statistics=statistics
    )


def _sampled(case: Case) -> Contestant:
    """Row sums, and entropies of one block of query rows in eight."""
    run = _kernel(case, {"return_sums": "entropy", "entropy_every": 8})
    reason = None if on_triton(case) else "the CPU backend computes all entropies"
    return Contestant(
        "row sums, one entropy in 8", "relu", run, case, on_triton(case), statistics=2,
        entropy_every=8, absent=reason,
    )  # fmt: skip


def _kernel(case: Case, change: Mapping[str, Any], packing: Packing | None = None) -> Run:
    """A direct call of the fused kernel; `change` holds fields of call, rule and visibility."""
    kernel = triton.attend if on_triton(case) else cpu.attend
    rule = Rectified(**_fields(Rectified, change))
    visibility = Visibility(**{"causal": case.causal, **_fields(Visibility, change)})
    shared = {name: change[name] for name in Call._fields if name in change}

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        call = Call(q, k, v, visibility, case.width**-0.5, packing=packing, **shared)
        return tuple(tensor for tensor in kernel(call, rule) if tensor is not None)

    return run


def _fields(kind: type[Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The changes that are fields of a dataclass."""
    names = (field.name for field in fields(kind))
    return {name: change[name] for name in names if name in change}


def _cuts(case: Case) -> list[int]:
    """Position of a cut in each sequence, such that lengths are spread evenly over 0 to n."""
    return [case.keys * (2 * row + 1) // (2 * case.batch) for row in range(case.batch)]


def _packed(name: str, case: Case, cuts: Sequence[int] = ()) -> Contestant:
    """The same tokens as packed sequences; `cuts` [B] divide each sequence into two.

    If padded, the ragged sequences would be nearly half padding. Their work, the sum of the squared
    lengths, is less than that of the plain call.
    """
    n = case.keys
    borders = {row * n for row in range(case.batch + 1)}
    borders |= {row * n + cut for row, cut in enumerate(cuts)}
    ends = torch.tensor(sorted(borders), device=case.device, dtype=torch.int32)
    lengths = [end - start for start, end in pairwise(sorted(borders))]
    longest, work = max(lengths), sum(length**2 for length in lengths) / (case.batch * n**2)

    kernel = _kernel(case, {}, Packing(ends, ends, longest, longest))

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
        out, *_ = kernel(q, k, v)
        return (out.view(case.batch, case.queries, *out.shape[1:]).transpose(1, 2),)

    def options(batch: int, heads: int) -> dict[str, Any]:
        # The comparison with float64 takes the first and the last sequence.
        if not cuts:
            return {}
        position = torch.arange(n, device=case.device)
        side = position < torch.tensor([[cuts[0]], [cuts[-1]]], device=case.device)
        return {"mask": (side[:, :, None] == side[:, None, :]).unsqueeze(1)}

    runs = on_triton(case)
    reason = None if runs else "the CPU backend does not support packed sequences"
    return Contestant(name, "relu", run, case, runs, options, absent=reason, work=work)
