"""The memory of checked calls: what is remembered, and what is always checked again."""

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from reluformer import attention, relu_attention
from reluformer.errors import UserError
from reluformer.ops import api, signature
from tests.ops.inputs import make


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the attentions whose calls were checked."""
    names: list[str] = []
    original = api.check_attention

    def check(row: Any, call: Any, options: Any) -> None:
        names.append(row.name)
        original(row, call, options)

    monkeypatch.setattr(api, "check_attention", check)
    return names


def test_a_repeated_signature_is_checked_once(checked: list[str]) -> None:
    for seed in range(3):
        q, k, v = make(seed=seed)
        relu_attention(q, k, v, causal=True, gamma=torch.rand(4) + seed)
    assert checked == ["relu"]


@pytest.mark.parametrize(
    "change",
    [
        {"causal": False},
        {"window": 2},
        {"scale": 0.3},
        {"dropout_p": 0.1},
        {"impl": "reference"},
        {"return_sums": "row_sum"},
        {"entropy_every": 2},
        {"power": 2},
        {"threshold": -1.0},
        {"gamma": torch.ones(4)},
        {"gamma": torch.tensor(1.0)},
        {"mask": torch.ones(5, dtype=torch.bool)},
        {"mask": torch.ones(3, 5, dtype=torch.bool)},
        {"bias": torch.zeros(5, dtype=torch.float64)},
        {"key_lengths": torch.tensor([5, 5])},
        {"row_normalise": 0.1},
    ],
    ids=str,
)
def test_any_other_argument_is_another_signature(
    checked: list[str], change: dict[str, Any]
) -> None:
    q, k, v = make()
    relu_attention(q, k, v, causal=True)
    relu_attention(q, k, v, **{"causal": True, **change})
    assert checked == ["relu", "relu"]


@pytest.mark.parametrize("size", [{"rows": 4}, {"keys": 6}, {"width": 6}, {"dtype": torch.float32}])
def test_any_other_shape_or_dtype_is_another_signature(
    checked: list[str], size: dict[str, Any]
) -> None:
    relu_attention(*make())
    relu_attention(*make(**size))
    assert checked == ["relu", "relu"]


def test_autocast_is_part_of_the_signature(checked: list[str]) -> None:
    q, k, v = make(dtype=torch.float32)
    relu_attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        relu_attention(q, k, v)
    assert checked == ["relu", "relu"]


def test_the_library_of_products_is_part_of_the_signature_of_softmax(checked: list[str]) -> None:
    for precision in ("highest", "medium", "highest"):
        torch.set_float32_matmul_precision(precision)  # The tests reset it.
        attention("softmax", *make())
    assert checked == ["softmax", "softmax"]


def test_the_new_value_of_a_remembered_signature_counts() -> None:
    """Tensors in the rule are those of the call, not of the call that was remembered."""
    q, k, v = make()
    one, two = (relu_attention(q, k, v, gamma=torch.full((4,), g).double()) for g in (1.0, 2.0))
    torch.testing.assert_close(one, 2 * two)


def test_refused_calls_are_refused_again() -> None:
    q, k, v = make()
    for _ in range(2):
        with pytest.raises(UserError, match="power must be"):
            relu_attention(q, k, v, power=5)
        with pytest.raises(UserError, match="window must be"):
            relu_attention(q, k, v, window=0)
        with pytest.raises(UserError, match="gamma must be a number or a tensor"):
            relu_attention(q, k, v, gamma=[1.0])
    assert not signature.CHOICES


def test_transforms_and_compilers_are_not_remembered(checked: list[str]) -> None:
    q, k, v = make(dtype=torch.float32)

    def call(q: Tensor) -> Tensor:
        return attention("relu", q, k, v, impl="reference")

    torch.func.vmap(call)(q[None])
    torch.compile(call, backend="eager", fullgraph=True)(q)
    with FlopCounterMode(display=False):
        call(q)
    assert not signature.CHOICES


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "CAPACITY", 4)
    for rows in range(1, 12):
        relu_attention(*make(rows=rows))
        assert 1 <= len(signature.CHOICES) <= 4


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        ({"power": 2}, {"power": 2.0}),
        ({"power": 1}, {"power": True}),
        ({"power": 2}, {"power": numpy.int64(2)}),
        ({"window": 1}, {"window": True}),
        ({"window": 3}, {"window": 3.0}),
        ({"causal": True}, {"causal": 1}),
        ({"causal": False}, {"causal": 0.0}),
        ({"entropy_every": 1}, {"entropy_every": True}),
    ],
    ids=str,
)
def test_an_equal_number_of_another_type_is_still_refused(
    allowed: dict[str, Any], refused: dict[str, Any]
) -> None:
    q, k, v = make()
    relu_attention(q, k, v, **allowed)
    with pytest.raises(UserError, match=f"^{next(iter(refused))} must be"):
        relu_attention(q, k, v, **refused)
