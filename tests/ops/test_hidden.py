"""NaN and infinity in keys and values that a row cannot see change neither it nor its gradients."""

from operator import matmul
from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer import attention
from reluformer.ops.backends.cpu.native import library
from tests.ops.inputs import NAMES, make

VISIBILITY: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": 2},
    "causal window": {"causal": True, "window": 3},
    "key_lengths": {"key_lengths": torch.tensor([4, 9])},
    "mask": {"mask": torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) > 0.4},
    "flat mask": {"mask": torch.arange(9) % 3 > 0},
}
WAYS = [*((name, "reference") for name in NAMES), ("softmax", "sdpa"), ("relu", "cpu")]
every_visibility = pytest.mark.parametrize("visibility", VISIBILITY)
every_fill = pytest.mark.parametrize("fill", [torch.nan, torch.inf, -torch.inf])


def compare(name: str, impl: str, dtype: torch.dtype, fill: float, arguments: Any) -> None:
    """Rows that do not see the filled key: output and gradients as with zeros in its place."""
    place = 6
    # The path of spoilt calls computes in float32.
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}

    def run(filling: float, which: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = make(rows=9, keys=9, dtype=dtype)
        for letter, tensor in (("k", k), ("v", v)):
            if letter in which:
                tensor[:, :, place, ::2] = filling
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        output = attention(name, q, k, v, impl=impl, **arguments)
        unaffected = blind(arguments, place)[:, None, :, None]
        output.masked_fill(~unaffected, 0.0).sum().backward()
        return output.detach().masked_fill(~unaffected, 0.0), q.grad, k.grad, v.grad

    for which in ("k", "v", "kv"):
        found, wanted = run(fill, which), run(0.0, which)
        torch.testing.assert_close(found[0], wanted[0], **tolerance)
        rows = blind(arguments, place)
        torch.testing.assert_close(
            found[1].transpose(1, 2)[rows], wanted[1].transpose(1, 2)[rows], **tolerance
        )
        # A row that sees the key may spoil the gradients of all keys.
        elements = rows.all(dim=1)
        for one, other in zip(found[2:], wanted[2:], strict=True):
            torch.testing.assert_close(one[elements], other[elements], **tolerance)


def blind(arguments: Any, place: int) -> Tensor:
    """Rows that do not see the key at `place`: bool [2, 9]."""
    row = torch.arange(9)
    sees = torch.ones(2, 9, dtype=torch.bool)
    if arguments.get("causal"):
        sees &= place <= row
    if "window" in arguments:
        sees &= (row - place).abs() < arguments["window"]
    if "key_lengths" in arguments:
        sees &= (place < arguments["key_lengths"])[:, None]
    if "mask" in arguments:
        mask = arguments["mask"].expand(9, 9)
        sees &= mask[:, place]
    return ~sees


@every_visibility
@every_fill
@pytest.mark.parametrize(("name", "impl"), WAYS)
def test_hidden_numbers(name: str, impl: str, visibility: str, fill: float) -> None:
    compare(name, impl, torch.float64, fill, VISIBILITY[visibility])


@every_visibility
@every_fill
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["native", "torch"])
@pytest.mark.parametrize("options", [{}, {"power": 4, "row_normalise": 0.1}], ids=["", "power 4"])
def test_hidden_numbers_on_cpus(
    visibility: str,
    fill: float,
    dtype: torch.dtype,
    way: str,
    options: dict[str, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "native":
        request.getfixturevalue("compiled")
    else:
        monkeypatch.setattr(library, "load", lambda: None)
    compare("relu", "cpu", dtype, fill, {**VISIBILITY[visibility], **options})


def test_visible_numbers_are_not_hidden() -> None:
    q, k, v = make(rows=9, keys=9, dtype=torch.float32)
    v[:, :, 6, 1] = torch.nan
    for name, impl in WAYS:
        output = attention(name, q, k, v, causal=True, impl=impl)
        assert output[:, :, 6:].isnan().any(), (name, impl)


@pytest.mark.parametrize("rule", [{"causal": True}, {"window": 2}, {"causal": True, "window": 3}])
def test_the_compiled_reference_screens_without_a_product(rule: dict[str, Any]) -> None:
    """A mask needs a third product; consecutive keys do not."""
    q, k, v = make(rows=9, keys=9, dtype=torch.float32)
    products = []
    for more in (rule, {**rule, "mask": torch.ones(9, 9, dtype=torch.bool)}):
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, inputs: Any, graphs: Any = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()
        function = torch.compile(attention, fullgraph=True, backend=keep)
        function("sigmoid", q, k, v, impl="reference", **more)
        (graph,) = graphs
        products.append(sum(node.target in (matmul, torch.matmul) for node in graph.graph.nodes))
    assert products == [2, 3]


def test_compiled_reference() -> None:
    q, k, v = make(rows=9, keys=9, dtype=torch.float32)
    wanted = attention("relu", q, k, v, causal=True)
    v[:, :, 6] = torch.nan
    function = torch.compile(attention, fullgraph=True, backend="eager")
    found = function("relu", q, k, v, causal=True)
    torch.testing.assert_close(found[:, :, :6], wanted[:, :, :6])
    assert found[:, :, 6:].isnan().all()


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_of_the_triton_kernels(rows: int, causal: bool) -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreter is off")

    def run(fill: float) -> list[Tensor]:
        q, k, v = make(rows=rows, keys=9, width=16, value_width=16, dtype=torch.float32)
        k[0, :, 4:], v[0, :, 4:] = fill, fill
        leaves = [t.requires_grad_() for t in (q, k, v)]
        lengths = torch.tensor([4, 9])
        output = attention("relu", *leaves, key_lengths=lengths, causal=causal, impl="triton")
        return [output, *torch.autograd.grad(output.sum(), leaves)]

    for fill in (torch.nan, torch.inf):
        torch.testing.assert_close(run(fill), run(0.0))
