"""What a trained model does with its memories: the paper's measures, on any of our models.

`batch` is always the keyword arguments of the model's `forward`, for example
`{"source": source, "target": target, "source_lengths": lengths}`. Padding takes no part in any
mean. Nothing here leaves a trace in the model.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from reluformer.model.base import Model
from reluformer.model.blocks import AttentionBranch, MemoryBranch
from reluformer.model.memory import KeyValueMemory
from reluformer.model.records import AttentionRecord
from reluformer.ops import Stats

Batch = Mapping[str, Any]

TOP_PERCENT = 0.2
"""The paper: with softmax the top 0.2 % of the slots carry over 85 % of the weight."""


class Branch(NamedTuple):
    """Variance over features of one residual branch, averaged over tokens."""

    name: str
    branch: float
    residual: float
    ratio: float
    """branch / residual: how much the branch can change what flows past it."""


class AttentionReport(NamedTuple):
    """Means over the rows and heads of one attention."""

    site: str
    layer: int
    row_sum: float
    entropy: float
    zeros: float
    """Share of visible keys with weight zero."""
    dead_rows: float
    """Share of rows that see keys and give none any weight."""
    max: float
    top_share: float
    """Share of the weight on the top 0.2 % of the keys (at least one)."""


class MemoryReport(NamedTuple):
    """Means over the tokens that read one global memory."""

    name: str
    zeros: float
    dead_slots: float
    """Share of slots that no token of the batch reads."""
    entropy: float
    top_share: float
    anisotropy: float
    output_variance: float


def top_share(weights: Tensor, percent: float = TOP_PERCENT, n: Tensor | None = None) -> Tensor:
    """Centralisation: share of sum |w| on the top `percent` % of the last dimension, [...].

    `n` [...] is the number of slots each row can see, all by default. At least one slot counts as
    the top; a row without weight has share 0.
    """
    sizes = weights.abs()
    if n is None:
        n = torch.full(sizes.shape[:-1], sizes.shape[-1], device=sizes.device)
    count = (n * percent / 100).round().clamp_min(1).long()
    heaviest = sizes.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    top = heaviest.gather(-1, count.unsqueeze(-1) - 1).squeeze(-1)
    total = heaviest[..., -1]
    return torch.where(total > 0, top / torch.where(total > 0, total, 1.0), 0.0)


def anisotropy(vectors: Tensor) -> float:
    """Mean cosine of all pairs of different rows of [n, width]; near 0 for spread directions."""
    units = nn.functional.normalize(vectors.detach().double(), dim=-1)
    n = units.shape[0]
    if n < 2:
        return math.nan
    return float((units.sum(dim=0).square().sum() - units.square().sum()) / (n * (n - 1)))


def branch_variances(model: Model, batch: Batch) -> list[Branch]:
    """Output variance and variance ratio of every attention and memory branch, in order."""
    seen: dict[str, dict[str, Tensor]] = {}
    with ExitStack() as hooks, _inspecting(model):
        for name, module in model.named_modules():
            if isinstance(module, (AttentionBranch, MemoryBranch)):
                inner = module.attention if isinstance(module, AttentionBranch) else module.memory
                record = seen.setdefault(name, {})
                hooks.enter_context(_watch(module, lambda args, _, r=record: r.update(x=args[0])))
                hooks.enter_context(
                    _watch(inner, lambda _, out, r=record: r.update(out=_tensor(out)))
                )
        model(**batch)
    return [
        _branch(name, r["out"], r["x"], _valid(name, r["x"], batch)) for name, r in seen.items()
    ]


def attention_reports(model: Model, batch: Batch) -> list[AttentionReport]:
    """Row sums, entropy, zeros, dead rows and centralisation of every attention."""
    with _inspecting(model):
        records = model(**batch, record="weights").records
    return [_attention_report(record) for record in records]


def memory_reports(model: Model, batch: Batch) -> list[MemoryReport]:
    """Zeros, dead slots, centralisation and anisotropy of every global memory of the blocks."""
    inputs: dict[str, Tensor] = {}
    memories = {n: m for n, m in model.named_modules() if isinstance(m, KeyValueMemory)}
    with ExitStack() as hooks, _inspecting(model):
        for name, memory in memories.items():
            hooks.enter_context(_watch(memory, lambda args, _, n=name: inputs.update({n: args[0]})))
        model(**batch)
    with _inspecting(model):
        return [
            _memory_report(name, memories[name], x[_valid(name, x, batch)])
            for name, x in inputs.items()
        ]


def attention_maps(model: Model, batch: Batch) -> dict[tuple[str, int], Tensor]:
    """Weights [B, H, Tq, Tk] by (site, layer), sites being encoder, decoder and cross."""
    with _inspecting(model):
        records = model(**batch, record="weights").records
    return {(r.site, r.layer): r.weights for r in records if r.weights is not None}


def _branch(name: str, out: Tensor, x: Tensor, valid: Tensor) -> Branch:
    branch = float(out[valid].double().var(dim=-1, correction=0).mean())
    residual = float(x[valid].double().var(dim=-1, correction=0).mean())
    return Branch(name, branch, residual, branch / residual if residual > 0 else math.nan)


def _attention_report(record: AttentionRecord) -> AttentionReport:
    stats, weights = record.stats, record.weights
    assert isinstance(stats, Stats) and weights is not None
    rows = (record.valid & (stats.visible > 0)).expand_as(stats.row_sum)
    dead = rows & (stats.row_sum == 0)

    def mean(values: Tensor) -> float:
        return float(values[rows].double().mean())

    return AttentionReport(
        site=record.site,
        layer=record.layer,
        row_sum=mean(stats.row_sum),
        entropy=mean(stats.entropy),
        zeros=mean(stats.zeros),
        dead_rows=mean(dead),
        max=mean(stats.max),
        top_share=mean(top_share(weights, n=stats.visible)),
    )


def _memory_report(name: str, memory: KeyValueMemory, x: Tensor) -> MemoryReport:
    output, weights = memory(x, return_weights=True)
    sizes = weights.abs()
    total = sizes.sum(dim=-1, keepdim=True)
    shares = sizes / torch.where(total > 0, total, 1.0)
    return MemoryReport(
        name=name,
        zeros=float((weights == 0).double().mean()),
        dead_slots=float((sizes.amax(dim=0) == 0).double().mean()),
        entropy=float(-torch.xlogy(shares, shares).sum(dim=-1).double().mean()),
        top_share=float(top_share(weights).double().mean()),
        anisotropy=anisotropy(memory.values.flatten(0, -2)),
        output_variance=float(output.double().var(dim=-1, correction=0).mean()),
    )


def _valid(name: str, x: Tensor, batch: Batch) -> Tensor:
    """Bool [B, T]: the tokens of x [B, T, width] that are no padding, by the module's name."""
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
def _watch(module: nn.Module, see: Any) -> Iterator[None]:
    hook = module.register_forward_hook(lambda _, args, out: see(args, out))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _inspecting(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
