"""Cases of rectified attention and their float64 formula, for every fast implementation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reluformer.ops.call import Call, KernelResult, Packing
from reluformer.ops.rule import Rectified
from reluformer.ops.visibility import Visibility

Attend = Callable[[Call, Rectified], KernelResult]


@dataclass(frozen=True)
class Case:
    """One call. Lengths are odd on purpose: no tile divides them."""

    name: str
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    queries: int = 29
    keys: int = 45
    width: int = 16
    value_width: int = 16
    power: int = 1
    length_exponent: float = 0.5
    causal: bool = False
    window: int | None = None
    key_lengths: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    gamma: bool = False
    threshold: tuple[float, ...] | float = 0.0
    statistics: int = 0
    """0: none, 1: row sums, 2: and sums of w log w."""
    row_normalise: float | None = None

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("full"),
    Case("causal", causal=True),
    Case("causal, more queries than keys", causal=True, queries=45, keys=29),
    Case("window", window=9),
    Case("causal window", causal=True, window=9, gamma=True),
    Case("window wider than the keys", window=99),
    Case("padding", batch=2, key_lengths=(45, 19), power=2),
    Case("causal padding, nothing", batch=2, key_lengths=(0, 40), causal=True, statistics=2),
    Case("mask", mask=(1, 2, 29, 45), statistics=2, gamma=True),
    Case("broadcast mask", batch=2, mask=(2, 1, 1, 45), causal=True, statistics=1),
    Case("groups", heads=4, kv_heads=2, gamma=True, threshold=(0.4, -0.3, 0.0, 0.2), statistics=1),
    Case("one key head", heads=4, kv_heads=1, causal=True, power=2, threshold=-0.2),
    Case("thresholds", threshold=(0.5, -0.5), statistics=2, key_lengths=(19,)),
    Case("power two", power=2, statistics=2, gamma=True, threshold=(0.5, -0.5), causal=True),
    Case("power four", power=4, statistics=2, gamma=True, threshold=(-4.0, -0.5), causal=True),
    Case(
        "power eight", power=8, statistics=2, gamma=True, threshold=(-8.0, -4.0), key_lengths=(38,)
    ),
    Case("power eight, divided", power=8, threshold=-8.0, causal=True, row_normalise=1e-2),
    Case("power four, groups", heads=4, power=4, length_exponent=1.0, threshold=-4.0),
    Case("widths", width=32, value_width=16, length_exponent=1.0, gamma=True, statistics=2),
    Case("one query", queries=1, keys=70, causal=True, gamma=True, threshold=(0.1, -0.1)),
    Case("no length", length_exponent=0.0, threshold=0.3),
    # Rows divided by their sums. A threshold of 3 leaves many of them without any weight.
    Case("divided", row_normalise=0.01),
    Case("divided, power four", power=4, threshold=(-4.0, -0.5), causal=True, row_normalise=1e-4),
    Case(
        "divided, gamma",
        power=2,
        gamma=True,
        threshold=(3.0, -0.5),
        statistics=1,
        row_normalise=0.1,
    ),
    Case(
        "divided, padding, nothing",
        batch=2,
        key_lengths=(0, 40),
        causal=True,
        gamma=True,
        threshold=(0.5, 3.0),
        statistics=2,
        row_normalise=0.5,
    ),
    Case(
        "divided, groups",
        heads=4,
        queries=13,
        window=9,
        power=4,
        gamma=True,
        threshold=(-1.0, 3.0, 0.5, -3.0),
        statistics=2,
        row_normalise=1.0,
    ),
    Case(
        "divided, mask", mask=(1, 2, 29, 45), gamma=True, threshold=(0.2, -0.5), row_normalise=0.1
    ),
    Case("divided, one query", queries=1, keys=70, power=2, gamma=True, row_normalise=0.5),
]


@dataclass
class Arguments:
    """Leaves that require a gradient, and the keyword arguments that make up the call."""

    leaves: dict[str, Tensor]
    options: dict[str, Any]
    cotangents: list[Tensor]


def arguments(case: Case, dtype: torch.dtype, device: str, transposed: bool = True) -> Arguments:
    """Random inputs; q, k, v are views of [B, T, H, D] unless `transposed` is off."""

    def heads(count: int, length: int, width: int) -> Tensor:
        order = (length, count) if transposed else (count, length)
        size = case.batch * length * count * width
        # Memory behind the tensor must never be read: it is NaN.
        storage = torch.full((size + 64 * count * width,), float("nan"), device=device, dtype=dtype)
        storage[:size] = (torch.randn(size) * 8).round().div(8).to(device, dtype)
        made = storage[:size].view(case.batch, *order, width)
        return made.transpose(1, 2) if transposed else made

    leaves = {
        "q": heads(case.heads, case.queries, case.width),
        "k": heads(case.kv_heads, case.keys, case.width),
        "v": heads(case.kv_heads, case.keys, case.value_width),
    }
    # Gradients jump where a score is 0. Here q.k is exact in float32, a multiple of 1/64 plus
    # 1/128: never 0, and no rounding decides on which side it falls.
    leaves["q"][..., 0] = 1.0
    leaves["k"][..., 0] = leaves["k"][..., 0].clamp(-0.5, 0.5) + 1 / 128
    small = dtype if dtype == torch.float64 else torch.float32
    if case.gamma:
        leaves["gamma"] = (0.7 + torch.rand(case.heads)).to(device, small)
    if isinstance(case.threshold, tuple):
        leaves["threshold"] = torch.tensor(case.threshold, device=device, dtype=small)
    for leaf in leaves.values():
        leaf.requires_grad_()
    mask = None
    if case.mask is not None:
        mask = (torch.rand(case.mask) > 0.4).to(device)
        if case.mask[2] > 3:
            mask[:, :, 3] = False
    lengths = None
    if case.key_lengths is not None:
        lengths = torch.tensor(case.key_lengths, device=device)
    options = {
        "scale": case.width**-0.5,
        "gamma": leaves.get("gamma", 1.3),
        "length_exponent": case.length_exponent,
        "power": case.power,
        "threshold": leaves.get("threshold", case.threshold),
        "causal": case.causal,
        "window": case.window,
        "key_lengths": lengths,
        "mask": mask,
        "dropout_p": 0.0,
        "statistics": case.statistics,
        "row_normalise": case.row_normalise,
    }
    rows = (case.batch, case.heads, case.queries)
    cotangents = [torch.randn(*rows, case.value_width).to(device, dtype)]
    cotangents += [torch.randn(rows).to(device, small) for _ in range(case.statistics)]
    return Arguments(leaves, options, cotangents)


def huge(case: Case, dtype: torch.dtype, device: str, size: float) -> Arguments:
    """Inputs `size` times as large, with a scale that makes their scores ordinary again."""
    given = arguments(case, dtype, device)
    with torch.no_grad():
        given.leaves["q"].mul_(size)
        given.leaves["k"].mul_(size)
    given.options["scale"] = size**-2
    return given


def visible(options: dict[str, Any], shape: tuple[int, ...]) -> Tensor:
    """The boolean [B, H, Tq, Tk] that the call's mask, lengths, causality and window make."""
    _, _, queries, keys = shape
    given = [options[name] for name in ("mask", "key_lengths") if options[name] is not None]
    device = given[0].device if given else None
    position = torch.arange(queries, device=device)[:, None] + keys - queries
    col = torch.arange(keys, device=device)
    seen = torch.ones(shape, dtype=torch.bool, device=device)
    if options["mask"] is not None:
        seen = seen & options["mask"]
    if options["key_lengths"] is not None:
        seen = seen & (col < options["key_lengths"][:, None, None, None])
    if options["causal"]:
        seen = seen & (col <= position)
    if options["window"] is not None:
        seen = seen & ((position - col).abs() < options["window"])
    return seen


def weights(leaves: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """w [B, H, Tq, Tk], by the formula and nothing else."""
    q, k = leaves["q"], leaves["k"]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    score = options["scale"] * q @ k.transpose(-2, -1)
    seen = visible(options, tuple(score.shape)).to(q.device)
    gamma, threshold = (
        value[:, None, None] if isinstance(value, Tensor) and value.dim() == 1 else value
        for value in (options["gamma"], options["threshold"])
    )
    n = seen.sum(-1, keepdim=True).clamp(min=1).to(score.dtype)
    norm = gamma * (n / 2) ** options["length_exponent"]
    return torch.where(seen, torch.relu(score - threshold) ** options["power"] / norm, 0.0)


def formula(
    leaves: dict[str, Tensor], options: dict[str, Any], kept: Tensor | float = 1.0
) -> list[Tensor]:
    """[output, row sums, sums of w log w], as far as asked for; `kept` multiplies what reads v."""
    w = weights(leaves, options)
    v = leaves["v"].repeat_interleave(leaves["q"].shape[1] // leaves["v"].shape[1], 1)
    out = (w * kept) @ v
    if options["row_normalise"] is not None:
        out = out / (w.sum(-1, keepdim=True) + options["row_normalise"])
    log = torch.where(w > 0, torch.where(w > 0, w, 1.0).log(), 0.0)
    return [out, w.sum(-1), (w * log).sum(-1)][: 1 + options["statistics"]]


def expected(
    given: Arguments, kept: Tensor | float = 1.0
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of the formula in float64."""
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in given.leaves.items()}
    options = {**given.options, **{name: leaf for name, leaf in leaves.items() if len(name) > 1}}
    outputs = formula(leaves, options, kept)
    grads = torch.autograd.grad(
        outputs, list(leaves.values()), [each.double() for each in given.cotangents]
    )
    return outputs, dict(zip(leaves, grads, strict=True))


def contract(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], packing: Packing | None = None
) -> tuple[Call, Rectified]:
    """The call and the rule that a kernel takes, from the options of a case."""
    visibility = Visibility(
        options["mask"], options["causal"], options["key_lengths"], options["window"]
    )
    call = Call(
        q,
        k,
        v,
        visibility,
        options["scale"],
        dropout_p=options["dropout_p"],
        return_sums=(None, "row_sum", "entropy")[options["statistics"]],
        entropy_every=options.get("entropy_every", 1),
        packing=packing,
    )
    names = ("gamma", "length_exponent", "power", "threshold", "row_normalise")
    return call, Rectified(**{name: options[name] for name in names})


def run_kernel(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    packing: Packing | None = None,
) -> KernelResult:
    """The results of a kernel."""
    return attend(*contract(q, k, v, options, packing))


def found(attend: Attend, given: Arguments) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of a kernel."""
    results = run_kernel(attend, *(given.leaves[name] for name in "qkv"), given.options)
    outputs = [each for each in results if each is not None]
    grads = torch.autograd.grad(outputs, list(given.leaves.values()), given.cotangents)
    return outputs, dict(zip(given.leaves, grads, strict=True))


def spread(given: Arguments) -> dict[str, Tensor]:
    """For each gradient of one value per head, [H]: the size to measure its error by.

    Such a gradient adds up a term for every weight. Where the sum happens to cancel, an error
    relative to it would say how well it cancels and nothing else. Errors are independent for each
    weight, or shared by a row: a kernel rounds the gradient of a row sum, or of an output row, once
    for all weights of the row. The result is the root of the sum of squares of all terms, or of
    the sums of rows, whichever is larger.
    """
    leaves = {name: leaf.detach().double() for name, leaf in given.leaves.items()}
    shape = (*leaves["q"].shape[:3], leaves["k"].shape[2])
    terms = {
        name: leaf[:, None, None].expand(shape).clone().requires_grad_()
        for name, leaf in leaves.items()
        if len(name) > 1
    }
    if not terms:
        return {}
    outputs = formula(leaves, {**given.options, **terms})
    cotangents = [each.double() for each in given.cotangents]
    grads = torch.autograd.grad(outputs, list(terms.values()), cotangents)
    sizes = {}
    for name, grad in zip(terms, grads, strict=True):
        by_weight = grad.square().sum((0, 2, 3)).sqrt()
        by_row = grad.sum(-1).square().sum((0, 2)).sqrt()
        sizes[name] = torch.maximum(by_weight, by_row)
    return sizes


def error(actual: Tensor, wanted: Tensor, size: Tensor | None = None) -> float:
    """Relative error in the Frobenius norm; absolute where nothing is wanted.

    Relative to `size` where that is larger than what is wanted.
    """
    assert actual.shape == wanted.shape
    actual, wanted = actual.detach().double(), wanted.detach().double()
    largest = max(float(each.norm()) for each in (wanted, size) if each is not None)
    return float((actual - wanted).norm()) / max(largest, 1e-6)


def check(attend: Attend, given: Arguments, forward: float, backward: float) -> None:
    """A kernel agrees with the formula, outputs and all gradients."""
    outputs, grads = found(attend, given)
    wanted_outputs, wanted_grads = expected(given)
    for at, (actual, wanted) in enumerate(zip(outputs, wanted_outputs, strict=True)):
        assert error(actual, wanted) <= forward, f"output {at}: {error(actual, wanted):.2e}"
    sizes = spread(given)
    for name, wanted in wanted_grads.items():
        assert grads[name].dtype == given.leaves[name].dtype
        off = error(grads[name], wanted, sizes.get(name))
        assert off <= backward, f"d{name}: {off:.2e}"
