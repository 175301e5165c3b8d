"""Error messages of memories."""

from typing import Any

import pytest
import torch
from torch import Tensor

from reluformer.errors import UserError
from reluformer.model.memory import KeyValueMemory


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((6, 16, "tanh"), "memory must be one of gelu, pattention"),
        ((0, 16), "width must be an integer of at least 1, got 0"),
        ((6, 2.5), "slots must be an integer of at least 1, got 2.5"),
        ((6, 16, "relu", {"heads": 2}), "heads must be 1 for a relu memory, got 2"),
        ((6, 16, "persistent", {"heads": 4}), "heads must divide width = 6, got 4"),
        ((6, 16, "persistent", {"bias": True}), "bias must be False for a persistent memory"),
        ((6, 16, "relu", {"dropout": 1.0}), "dropout must be in [0, 1), got 1.0"),
        ((6, 16, "relu", {"value_std": 0.0}), "value_std must be greater than 0, got 0.0"),
        ((6, 16, "relu", {"k": 2}), "relu memory has no option 'k'; its options: temperature"),
        ((6, 16, "top_k", {"n": 2}), "no option 'n'; its options: temperature, k, rank_by_value"),
        ((6, 16, "top_k", {"k": 17}), "k must be an integer from 1 to 16 (slots), got 17"),
        ((6, 15, "product_key_relu", {"k": 2}), "square for product keys, such as 9 or 16, got 15"),
        ((5, 16, "product_key_relu", {"k": 2}), "width must be even for product keys, got 5"),
        ((6, 16, "product_key_softmax", {"k": 0}), "k must be an integer from 1 to 16"),
        ((6, 16, "sigma_moe", {"experts": 5}), "experts must divide slots = 16, got 5"),
        ((6, 16, "sigma_moe", {"experts": 17}), "experts must be an integer from 1 to 16 (slots)"),
        ((6, 16, "sigma_moe", {"experts": 4, "k": 5}), "from 1 to 4 (experts), got 5"),
        ((6, 16, "sigma_moe", {"expert_dropout": 1}), "expert_dropout must be in [0, 1), got 1"),
    ],
)
def test_invalid_sizes_and_options_are_refused(arguments: tuple[Any, ...], said: str) -> None:
    options = arguments[-1] if isinstance(arguments[-1], dict) else {}
    positional = arguments[:-1] if options else arguments
    with pytest.raises(UserError) as error:
        KeyValueMemory(*positional, **options)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.randn(2, 5), "x must be [..., 6], got shape [2, 5]"),
        (torch.tensor(1.0), "x must be [..., 6], got shape []"),
        (torch.randn(2, 6).double(), "memory's dtype torch.float32, got torch.float64"),
        (torch.ones(2, 6, dtype=torch.int64), "memory's dtype torch.float32, got torch.int64"),
    ],
)
def test_invalid_queries_are_refused(x: Tensor, said: str) -> None:
    with pytest.raises(UserError) as error:
        KeyValueMemory(6, 16)(x)
    assert said in str(error.value)
