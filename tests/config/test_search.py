"""Settings of the search check themselves."""

from typing import Any

import pytest

from reluformer.config.search import SearchConfig
from reluformer.errors import UserError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "greedy"}, "method must be one of beam, sample, got 'greedy'"),
        ({"beam": 2.5}, "beam must be a whole number, got 2.5"),
        ({"beam": 0}, "beam must be at least 1, got 0"),
        ({"length_penalty": 1e308}, "length_penalty must be at most 20, got 1e"),
        ({"length_penalty": float("inf")}, "length_penalty must be a finite number, got inf"),
        ({"beam": 10**9}, "beam must be at most 1000, got 1000000000"),
        ({"max_ratio": 1e308}, "max_ratio must be at most 1000, got 1e"),
        ({"max_extra": 10**18}, "max_extra must be at most 1000000, got 1"),
        ({"temperature": 1e-320}, "temperature must be at least 1e-06, got 1e-320"),
        ({"max_ratio": -1}, "max_ratio must be at least 0, got -1"),
        ({"seed": 2**63}, r"seed must be between -2\^63 and 2\^63"),
        ({"top_p": "all"}, "top_p must be a number, got 'all'"),
    ],
)
def test_the_constructor_checks_its_arguments(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SearchConfig(**values)
