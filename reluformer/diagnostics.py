"""Diagnostics of a trained model: the paper's measures of attentions and memories.

A `batch` is the keyword arguments of the model's `forward`, for example
`{"source": source, "target": target, "source_lengths": lengths}`. Padding is excluded from all
means. The model is not changed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from reluformer.model.base import Model
from reluformer.model.blocks import AttentionBranch, MemoryBranch
from reluformer.model.memory import KeyValueMemory
from reluformer.model.records import AttentionRecord
from reluformer.ops.stats import Stats, has_weight

Batch = Mapping[str, Any]

TOP_PERCENT = 0.2
"""In the paper, the top 0.2 % of the slots of a softmax memory have over 85 % of the weight."""


class BranchVariance(NamedTuple):
    """Variance over features of one residual branch, averaged over tokens."""

    name: str
    """Path of the branch in the model, such as `encoder.0.memory`."""
    branch: float
    """Variance of the output of the branch."""
    residual: float
    """Variance of the residual stream before the branch."""
    ratio: float
    """branch / residual."""


class AttentionReport(NamedTuple):
    """Means over the rows and heads of one attention."""

    site: str
    """`encoder`, `decoder` or `cross`."""
    layer: int
    row_sum: float
    """Sum of the weights of a row before row normalisation."""
    entropy: float
    """Entropy of the row-normalised weights, in nats."""
    zeros: float
    """Share of visible keys with weight zero."""
    dead_rows: float
    """Share of rows that see keys and have no weight."""
    max: float
    """Largest weight of a row."""
    top_share: float
    """Share of the weight on the top 0.2 % of the keys (at least one), over rows with weight."""


class MemoryReport(NamedTuple):
    """Means over the tokens of one global memory."""

    name: str
    """Path of the memory in the model."""
    zeros: float
    """Share of slots with weight zero."""
    dead_slots: float
    """Share of slots without weight for all tokens of the batch."""
    entropy: float
    """Entropy of the row-normalised weights, in nats."""
    top_share: float
    """Share of the weight on the top 0.2 % of the slots (at least one), over tokens that read."""
    anisotropy: float
    """Mean cosine of pairs of values."""
    output_variance: float
    """Variance over the features of the output."""
    top_shares: tuple[float, ...] = ()
    """Share of the weight on the top p % of the slots, for every p that was asked for."""


def top_share(weights: Tensor, percent: float = TOP_PERCENT, n: Tensor | None = None) -> Tensor:
    """Centralisation: share of sum |w| on the largest weights of each row, [...].

    Args:
        weights: [..., slots].
        percent: Percentage of the slots that counts as the top, at least one slot.
        n: Number of slots that each row sees, [...]; None for all slots.

    Returns:
        Share of each row, [...]; 0 for a row without weight.
    """
    return top_shares(weights, (percent,), n)[..., 0]


def top_shares(weights: Tensor, percents: Sequence[float], n: Tensor | None = None) -> Tensor:
    """`top_share` for several percentages at the cost of one: [..., percents]."""
    sizes = weights.abs()
    if n is None:
        n = torch.full(sizes.shape[:-1], sizes.shape[-1], device=sizes.device)
    counts = [(n * percent / 100).round().clamp_min(1).long() for percent in percents]
    heaviest = sizes.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    top = heaviest.gather(-1, torch.stack(counts, dim=-1) - 1)
    total = heaviest[..., -1:]
    return torch.where(total > 0, top / torch.where(total > 0, total, 1.0), 0.0)


def anisotropy(vectors: Tensor) -> float:
    """Mean cosine of all pairs of rows of [n, width]; near 0 if directions are spread out."""
    units = nn.functional.normalize(vectors.detach().double(), dim=-1)
    n = units.shape[0]
    if n < 2:
        return math.nan
    return float((units.sum(dim=0).square().sum() - units.square().sum()) / (n * (n - 1)))


def branch_variances(model: Model, batch: Batch) -> list[BranchVariance]:
    """Output variance and variance ratio of every attention and memory branch, in order."""
    tensors: dict[str, dict[str, Tensor]] = {}
    with ExitStack() as hooks, evaluating(model):
        for name, module in model.named_modules():
            if isinstance(module, (AttentionBranch, MemoryBranch)):
                inner = module.attention if isinstance(module, AttentionBranch) else module.memory
                record = tensors.setdefault(name, {})
                hooks.enter_context(_hook(module, lambda args, _, r=record: r.update(x=args[0])))
                hooks.enter_context(
                    _hook(inner, lambda _, out, r=record: r.update(out=_tensor(out)))
                )
        model(**batch)
    return [
        _branch(name, r["out"], r["x"], _valid(name, r["x"], batch)) for name, r in tensors.items()
    ]


def attention_reports(model: Model, batch: Batch) -> list[AttentionReport]:
    """Row sums, entropy, zeros, dead rows and centralisation of every attention."""
    with evaluating(model):
        records = model(**batch, record="weights").records
    return [_attention_report(record) for record in records]


def memory_reports(
    model: Model, batch: Batch, percents: Sequence[float] = ()
) -> list[MemoryReport]:
    """Zeros, dead slots, centralisation and anisotropy of every feed-forward memory.

    `percents` are the shares of the slots, in percent, of `MemoryReport.top_shares`.
    """
    inputs: dict[str, Tensor] = {}
    memories = {n: m for n, m in model.named_modules() if isinstance(m, KeyValueMemory)}
    with ExitStack() as hooks, evaluating(model):
        for name, memory in memories.items():
            hooks.enter_context(_hook(memory, lambda args, _, n=name: inputs.update({n: args[0]})))
        model(**batch)
    with evaluating(model):
        return [
            _memory_report(name, memories[name], x[_valid(name, x, batch)], percents)
            for name, x in inputs.items()
        ]


def attention_maps(model: Model, batch: Batch) -> dict[tuple[str, int], Tensor]:
    """Weights [B, H, Tq, Tk] by (site, layer), sites being encoder, decoder and cross."""
    with evaluating(model):
        records = model(**batch, record="weights").records
    return {(r.site, r.layer): r.weights for r in records if r.weights is not None}


def _branch(name: str, out: Tensor, x: Tensor, valid: Tensor) -> BranchVariance:
    branch = float(out[valid].double().var(dim=-1, correction=0).mean())
    residual = float(x[valid].double().var(dim=-1, correction=0).mean())
    return BranchVariance(name, branch, residual, branch / residual if residual > 0 else math.nan)


def _attention_report(record: AttentionRecord) -> AttentionReport:
    stats, weights = record.stats, record.weights
    assert isinstance(stats, Stats) and weights is not None
    rows = (record.valid & (stats.visible > 0)).expand_as(stats.row_sum)
    live = has_weight(stats.row_sum)
    shares = top_share(weights, n=stats.visible)[rows & live]

    def mean(values: Tensor) -> float:
        return float(values[rows].double().mean())

    return AttentionReport(
        site=record.site,
        layer=record.layer,
        row_sum=mean(stats.row_sum),
        entropy=mean(stats.entropy),
        zeros=mean(stats.zeros),
        dead_rows=mean(~live),
        max=mean(stats.max),
        top_share=float(shares.double().mean()) if len(shares) else 0.0,
    )


def _memory_report(
    name: str, memory: KeyValueMemory, x: Tensor, percents: Sequence[float]
) -> MemoryReport:
    output, weights = memory(x, return_weights=True)
    sizes = weights.abs()
    total = sizes.sum(dim=-1, keepdim=True)
    shares = sizes / torch.where(total > 0, total, 1.0)
    tops = top_shares(weights, (TOP_PERCENT, *percents)).double().flatten(0, -2)
    read = total.flatten() > 0
    top, *others = tops[read].mean(0).tolist() if read.any() else [0.0] * tops.shape[-1]
    return MemoryReport(
        name=name,
        zeros=float((weights == 0).double().mean()),
        dead_slots=float((sizes.amax(dim=0) == 0).double().mean()),
        entropy=float(-torch.xlogy(shares, shares).sum(dim=-1).double().mean()),
        top_share=top,
        anisotropy=anisotropy(memory.values.flatten(0, -2)),
        output_variance=float(output.double().var(dim=-1, correction=0).mean()),
        top_shares=tuple(others),
    )


def _valid(name: str, x: Tensor, batch: Batch) -> Tensor:
    """Bool [B, T]: tokens of x [B, T, width], the input of module `name`, that are not padding."""
    side = "source_lengths" if name.startswith("encoder") else "target_lengths"
    lengths = batch.get(side, batch.get("lengths"))
    if lengths is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    valid: Tensor = torch.arange(x.shape[1], device=x.device) < lengths.to(x.device).unsqueeze(-1)
    return valid


def _tensor(out: Any) -> Tensor:
    tensor: Tensor = out if isinstance(out, Tensor) else out.output
    return tensor


@contextmanager
def _hook(module: nn.Module, callback: Any) -> Iterator[None]:
    """Context in which `callback(args, output)` is called after each forward of `module`."""
    hook = module.register_forward_hook(lambda _, args, out: callback(args, out))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager: the model in evaluation mode, without gradients."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
