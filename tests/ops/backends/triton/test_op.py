"""The fused kernels against the formula, in Triton's interpreter or, with `-m gpu`, on a GPU."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from reluformer import relu_attention
from reluformer.errors import UserError
from reluformer.ops.backends.triton import op, operators, tuning
from reluformer.ops.backends.triton.portable.arguments import OptionalInputs
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings
from reluformer.ops.backends.triton.tuning import Tile
from reluformer.ops.call import Call, Packing
from reluformer.ops.rule import Rectified
from reluformer.ops.visibility import Visibility
from tests.ops.rectified import (
    CASES,
    Arguments,
    Case,
    arguments,
    check,
    expected,
    found,
    huge,
    run_kernel,
    weights,
)

KERNELS: tuple[tuning.Kernel, ...] = ("forward", "dkv", "dq")
SMALL = {"forward": Tile(16, 32, 4, 1), "dkv": Tile(16, 32, 4, 1), "dq": Tile(32, 16, 4, 1)}
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _small(one_loop: bool) -> dict[tuning.Kernel, Tile]:
    """Small tiles with separate loops for whole and masked tiles, or with one loop."""
    return {kernel: replace(SMALL[kernel], one_loop=one_loop) for kernel in KERNELS}


@on_cpu
@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: CASES[at].name)
def test_matches_the_formula(at: int) -> None:
    # Descriptors and pointers, both memory orders, over the cases.
    with tuning.override(dict(SMALL), tma=at % 2 == 0):
        given = arguments(CASES[at], torch.float32, "cpu", transposed=at % 3 > 0)
        check(op.attend, given, 2e-6, 5e-6)


@on_cpu
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case("one loop", causal=True, key_lengths=(20,), statistics=2),
        Case("prescaled", causal=True, statistics=2, threshold=(0.2, -0.2)),
        Case("prescaled, power four", causal=True, power=4, gamma=True, threshold=(-4.0, 0.2)),
        Case(
            "prescaled, divided",
            heads=4,
            power=4,
            key_lengths=(20,),
            gamma=True,
            threshold=(-4.0, 3.0, 0.2, 0.0),
            statistics=2,
            row_normalise=1e-2,
        ),
    ],
    ids=str,
)
def test_variants_of_a_tile(case: Case, tma: bool) -> None:
    tile = Tile(16, 16, 4, 1, one_loop=case.name == "one loop", prescale=True)
    with tuning.override(dict.fromkeys(KERNELS, tile), tma=tma):
        check(op.attend, arguments(case, torch.float32, "cpu"), 2e-6, 5e-6)


@on_cpu
@pytest.mark.parametrize("row_normalise", [None, 0.01])
def test_float16(row_normalise: float | None) -> None:
    case = Case(
        "half", causal=True, threshold=0.1, gamma=True, statistics=2, row_normalise=row_normalise
    )
    with tuning.override(dict(SMALL), tma=True):
        check(op.attend, arguments(case, torch.float16, "cpu"), 3e-3, 6e-3)


@on_cpu
@pytest.mark.parametrize(
    ("dtype", "power", "size", "bound"),
    [(torch.float16, 1, 1e2, 2e-3), (torch.float32, 4, 1e5, 2e-6)],
    ids=["float16", "power four"],
)
def test_huge_scores_stay_in_range(
    dtype: torch.dtype, power: int, size: float, bound: float
) -> None:
    case = Case("large", queries=16, keys=16, power=power, threshold=0.05)
    with tuning.override(dict(SMALL)):
        check(op.attend, huge(case, dtype, "cpu", size), bound, 2 * bound)


def _dropout_case(power: int) -> tuple[Arguments, Tensor]:
    case = Case("dropout", queries=21, keys=32, value_width=32, power=power, statistics=2)
    given = arguments(case, torch.float32, DEVICE)
    given.options["dropout_p"] = 0.4
    identity = torch.eye(32, device=DEVICE).expand(1, 2, 32, 32)
    q, k = given.leaves["q"], given.leaves["k"]
    torch.manual_seed(1)
    # With v the identity the output shows the weights that were kept.
    shown, _, _ = run_kernel(op.attend, q, k, identity, given.options)
    w = weights(given.leaves, given.options)
    kept = torch.where(w > 1e-6, shown / w.clamp(min=1e-6), 0.0).detach()
    return given, kept


def _check_dropout(power: int, row_normalise: float | None = None) -> None:
    given, kept = _dropout_case(power)
    # Rows are normalised by their sums before dropout.
    given.options["row_normalise"] = row_normalise
    assert 0.1 < float((kept > 0).float().mean()) < 0.5
    assert torch.allclose(kept[kept > 0], torch.tensor(1 / 0.6, device=DEVICE), rtol=1e-2)
    torch.manual_seed(1)
    outputs, grads = found(op.attend, given)
    wanted, wanted_grads = expected(given, (kept > 0).double() / 0.6)
    torch.testing.assert_close([x.double() for x in outputs], wanted, rtol=1e-3, atol=1e-4)
    for name, grad in wanted_grads.items():
        torch.testing.assert_close(grads[name].double(), grad, rtol=1e-3, atol=1e-4)


@on_cpu
@pytest.mark.parametrize(("power", "row_normalise"), [(1, None), (4, None), (4, 0.1)])
def test_dropout_is_the_same_forward_and_backward(power: int, row_normalise: float | None) -> None:
    with tuning.override(dict(SMALL)):
        _check_dropout(power, row_normalise)


@on_cpu
def test_dropout_looks_random() -> None:
    queries, keys, heads = 64, 128, 3
    ones = torch.ones(1, heads, keys, 16)
    options = arguments(Case("dropout"), torch.float32, DEVICE).options
    identity = torch.eye(keys).expand(1, heads, keys, keys)
    masks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        shown, _, _ = run_kernel(
            op.attend, ones[:, :, :queries], ones, identity, {**options, "dropout_p": 0.3}
        )
        masks.append((shown[0] > 0).double() - 0.7)
    first, second = masks
    # The kept share overall, per row and per column; then pairs are uncorrelated.
    assert abs(float(first.mean())) < 0.012
    assert float(first.mean(-1).abs().max()) < 0.2 and float(first.mean(-2).abs().max()) < 0.25
    pairs = [
        (first[..., 1:], first[..., :-1]),
        (first[:, 1:], first[:, :-1]),
        (first[1:], first[:-1]),
        (first, second),
        (first[:, 1:, 1:], first[:, :-1, :-1]),
    ]
    for a, b in pairs:
        assert abs(float((a * b).mean())) / 0.21 < 0.035


def _varlen(dtype: torch.dtype, row_normalise: float | None = None) -> dict[str, Any]:
    """Packed sequences, two of them empty, against one dense call per sequence."""
    q_ends, k_ends = [0, 5, 5, 10, 29], [0, 9, 12, 12, 45]
    case = Case("packed", batch=1, heads=4, gamma=True, threshold=(0.3, -0.3, 0.0, 0.1))
    case = replace(case, causal=True, statistics=2, row_normalise=row_normalise)
    given = arguments(case, dtype, DEVICE)
    packed = {name: leaf.detach()[0].transpose(0, 1) for name, leaf in given.leaves.items()
              if len(name) == 1}  # fmt: skip
    # Two rows past the last sequence hold NaN: they must neither be read nor get a gradient.
    tail = torch.full((2, 4, 16), float("nan"), device=DEVICE, dtype=dtype)
    for name in packed:
        packed[name] = torch.cat([packed[name], tail[:, : packed[name].shape[1]]]).requires_grad_()
    cu = [torch.tensor(ends, device=DEVICE, dtype=torch.int32) for ends in (q_ends, k_ends)]
    result = run_kernel(op.attend, *packed.values(), given.options, Packing(*cu, 19, 33))
    leaves = [*packed.values(), given.leaves["gamma"], given.leaves["threshold"]]
    cotangents = [torch.randn_like(x) for x in result]
    grads = torch.autograd.grad(result, leaves, cotangents)

    wanted = [torch.zeros_like(x, dtype=torch.float64) for x in result]
    wanted_grads = [torch.zeros_like(x, dtype=torch.float64) for x in leaves]
    for at in range(4):
        rows, cols = slice(*q_ends[at : at + 2]), slice(*k_ends[at : at + 2])
        if rows.start == rows.stop or cols.start == cols.stop:
            continue
        one = Arguments(
            {
                "q": packed["q"][rows].transpose(0, 1)[None],
                "k": packed["k"][cols].transpose(0, 1)[None],
                "v": packed["v"][cols].transpose(0, 1)[None],
                **{name: given.leaves[name] for name in ("gamma", "threshold")},
            },
            given.options,
            [cotangents[0][rows].transpose(0, 1)[None]]
            + [each[rows].transpose(0, 1)[None] for each in cotangents[1:]],
        )
        outputs, one_grads = expected(one)
        for whole, part in zip(wanted, outputs, strict=True):
            whole[rows] = part[0].transpose(0, 1).detach()
        for whole, (name, part) in zip(wanted_grads, one_grads.items(), strict=True):
            if len(name) == 1:
                whole[rows if name == "q" else cols] = part[0].transpose(0, 1)
            else:
                whole += part
    return {"found": [*result, *grads], "wanted": [*wanted, *wanted_grads]}


@on_cpu
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(("row_normalise", "one_loop"), [(None, False), (0.1, False), (0.1, True)])
def test_packed_sequences(tma: bool, row_normalise: float | None, one_loop: bool) -> None:
    with tuning.override(_small(one_loop), tma=tma):
        results = _varlen(torch.float32, row_normalise)
    for actual, wanted in zip(results["found"], results["wanted"], strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-4, atol=1e-5)


@on_cpu
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("one_loop", [False, True])
def test_padding_may_contain_nan(one_loop: bool, tma: bool) -> None:
    case = Case(
        "poisoned padding", batch=2, key_lengths=(20, 0), threshold=(-0.3, 0.3), statistics=2,
        row_normalise=0.1 if tma else None,
    )  # fmt: skip
    given = arguments(case, torch.float32, "cpu")
    clean, clean_grads = expected(given)
    with torch.no_grad():
        for name in "kv":
            given.leaves[name][0, :, 20:] = float("nan")
            given.leaves[name][1] = float("inf")
    with tuning.override(_small(one_loop), tma=tma):
        outputs, grads = found(op.attend, given)
    torch.testing.assert_close(outputs[0].double(), clean[0], rtol=1e-4, atol=1e-5)
    for name, wanted in clean_grads.items():
        torch.testing.assert_close(grads[name].double(), wanted, rtol=1e-4, atol=1e-5)


@on_cpu
@pytest.mark.parametrize("queries", [20, 3], ids=["forward", "decoding"])
@pytest.mark.parametrize("lengths", [(2**40, 20), (2**31 + 5, -(2**31) - 5)])
def test_lengths_beyond_32_bits(lengths: tuple[int, ...], queries: int) -> None:
    case = Case("", batch=2, queries=queries, keys=45, key_lengths=lengths, power=2)
    check(op.attend, arguments(case, torch.float32, "cpu"), 2e-6, 5e-6)


@on_cpu
def test_no_queries_or_no_keys() -> None:
    for queries, keys in ((0, 5), (5, 0)):
        given = arguments(Case("", queries=queries, keys=keys, statistics=2), torch.float32, "cpu")
        outputs, grads = found(op.attend, given)
        assert all(not each.any() for each in (*outputs, *grads.values()))


@on_cpu
def test_two_runs_agree_bit_by_bit_and_keep_the_layout() -> None:
    given = arguments(CASES[1], torch.float32, "cpu")
    with tuning.override(dict(SMALL)):
        first, second = (found(op.attend, given) for _ in range(2))
    assert torch.equal(first[0][0], second[0][0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    # Heads can be joined without a copy.
    assert first[0][0].transpose(1, 2).is_contiguous()
    assert first[1]["q"].transpose(1, 2).is_contiguous()


def _check_compiled(given: Arguments, backend: str | Callable[..., Any]) -> None:
    leaves = list(given.leaves.values())

    def step(scale: float) -> Tensor:
        q, k, v = (given.leaves[name] for name in "qkv")
        options = {**given.options, "scale": scale}
        found = [each for each in run_kernel(op.attend, q * 1.0, k, v, options) if each is not None]
        return sum((each.float().square().sum() for each in found), torch.zeros(()))

    plain = torch.autograd.grad(step(0.1), leaves)
    compiled = torch.autograd.grad(
        torch.compile(step, backend=backend, fullgraph=True)(0.1), leaves
    )
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one, other)


@on_cpu
def test_compiled_without_a_graph_break() -> None:
    with tuning.override(dict(SMALL)):
        for case in (CASES[8], replace(CASES[2], gamma=True, row_normalise=0.1)):
            _check_compiled(arguments(case, torch.float32, "cpu"), "aot_eager")


@on_cpu
def test_a_compiler_sees_no_reinterpreted_mask() -> None:
    """Inductor of torch 2.11 cannot view bool as uint8."""
    given, operations = arguments(CASES[8], torch.float32, "cpu"), set()

    def keep(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        operations.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    assert given.options["mask"] is not None
    with tuning.override(dict(SMALL)):
        _check_compiled(given, aot_autograd(fw_compiler=keep))
    assert "reluformer.rectified_attention_backward.default" in operations
    assert "aten.view.dtype" not in operations


@pytest.mark.parametrize("row_normalise", [0.0, 0.1])
def test_operator_is_well_formed(row_normalise: float) -> None:
    given = arguments(CASES[8], torch.float32, DEVICE)
    q, k, v = (given.leaves[name] for name in "qkv")
    mask = given.options["mask"].view(torch.uint8)
    problem = Problem(
        q, k, v, NO_INPUTS._replace(gamma=given.leaves["gamma"], mask=mask),
        Settings(0.25, 29, 45, row_normalise=row_normalise),
    )  # fmt: skip
    with tuning.override(dict(SMALL) if DEVICE == "cpu" else {}):
        torch.library.opcheck(
            torch.ops.reluformer.rectified_attention.default,
            (*operators.flatten(problem), 2),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_schema_has_the_fields_of_a_problem() -> None:
    schema = torch.ops.reluformer.rectified_attention.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names == ["q", "k", "v", *OptionalInputs._fields, *Settings._fields, "statistics"]


def test_unflatten_inverts_flatten() -> None:
    x = torch.zeros(1, 2, 3, 16)
    problem = Problem(x, x, x, NO_INPUTS._replace(gamma=torch.ones(2)), Settings(0.25, 3, 3))
    assert operators.unflatten((*operators.flatten(problem), "more")) == (problem, ("more",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"power": 5}, "power"),
        ({"scale": -1.0}, "scale"),
        ({"window": 0}, "window"),
    ],
)
def test_refuses_in_one_sentence(change: dict[str, Any], message: str) -> None:
    q, k, v = (torch.zeros(1, 2, 3, 16, device=DEVICE) for _ in "qkv")
    with pytest.raises(UserError, match=message):
        relu_attention(q, k, v, impl="triton", **change)


def test_high_powers_refuse_float16_inputs_and_autocast() -> None:
    q = torch.zeros(1, 2, 3, 16, device=DEVICE)
    text = "impl='triton' cannot run this relu attention: power 4 needs bfloat16 or float32"
    with pytest.raises(UserError, match=text):
        relu_attention(q.half(), q.half(), q.half(), power=4, impl="triton")
    with torch.autocast(DEVICE, torch.float16):
        with pytest.raises(UserError, match=text):
            relu_attention(q, q, q, power=4, impl="triton")
        assert not relu_attention(q, q, q, power=4).any()
    assert not relu_attention(q.half(), q.half(), q.half(), power=4).any()


def test_why_not_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 2, 3, 24)
    call = Call(x, x, x, Visibility(), scale=1.0)
    assert "head widths" in (op.why_not(call, Rectified()) or "head widths")
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET", raising=False)
    assert "CUDA" in (op.why_not(call, Rectified()) or "")
