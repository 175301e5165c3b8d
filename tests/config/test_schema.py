"""Dataclasses from mappings, with strict checks."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reluformer.config.schema import build, convert, convert_finite, override, to_dict
from reluformer.errors import UserError


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    steps: int = 5

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"steps must be at least 1, got {self.steps}")


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"] = "a"
    loud: bool = False
    limit: int | None = None
    either: int | str = 0
    sizes: tuple[int, ...] = (1, 2)
    betas: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def test_values_are_converted_to_their_types() -> None:
    settings = build(
        Outer,
        {
            "name": "x",
            "either": "all",
            "sizes": [3, 4],
            "betas": [1, "9.8e-1"],
            "inner": {"rate": "1e-3"},
            "extra": {"k": [1]},
        },
    )
    assert settings.inner.rate == 1e-3
    assert settings.sizes == (3, 4)
    assert settings.betas == [1.0, 0.98] and isinstance(settings.betas[0], float)
    assert build(Outer, to_dict(settings)) == settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "^name is required$"),
        ({"name": "x", "knid": "a"}, "^knid is not a known field; did you mean 'kind'\\? known: "),
        ({"name": "x", "zzz": 1}, "^zzz is not a known field; known: betas, either"),
        ({"name": "x", "kind": "c"}, "^kind must be one of a, b, got 'c' \\(str\\)$"),
        ({"name": "x", "inner": {"rat": 1}}, "^inner.rat is not a known field"),
        ({"name": "x", "inner": {"rate": "fast"}}, "^inner.rate must be a number, got 'fast'"),
        ({"name": "x", "inner": {"rate": True}}, "^inner.rate must be a number, got True"),
        ({"name": "x", "inner": {"steps": 1.5}}, "^inner.steps must be a whole number, got 1.5"),
        ({"name": "x", "inner": {"steps": True}}, "^inner.steps must be a whole number"),
        ({"name": "x", "inner": {"steps": 0}}, "^inner.steps must be at least 1, got 0$"),
        ({"name": "x", "inner": None}, "^inner must be a mapping of fields, got nothing"),
        ({"name": "x", "loud": "yes"}, "^loud must be true or false, got 'yes'"),
        ({"name": 3}, "^name must be text, got 3"),
        ({"name": "x", "limit": "many"}, "^limit must be a whole number, got 'many'"),
        ({"name": "x", "either": 1.5}, "^either must be one of the types int, str, got 1.5"),
        ({"name": "x", "sizes": 3}, "^sizes must be a list, got 3"),
        ({"name": "x", "sizes": [1, "b"]}, "^sizes\\[1\\] must be a whole number, got 'b'"),
        ({"name": "x", "extra": [1]}, "^extra must be a mapping"),
        ([], "^settings must be a mapping"),
    ],
)
def test_errors_name_the_field(values: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(Outer, values)


def test_overrides_change_nested_fields_of_a_copy() -> None:
    original = {"a": {"b": 1}, "c": 2}
    assert override(original, {"a.b": 3, "d.e.f": 4}) == {
        "a": {"b": 3},
        "c": 2,
        "d": {"e": {"f": 4}},
    }
    assert original == {"a": {"b": 1}, "c": 2}
    with pytest.raises(UserError, match="^c is a value, not a section$"):
        override(original, {"c.d": 1})


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
anything = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@given(st.dictionaries(st.sampled_from(["name", "kind", "limit", "sizes", "inner", "x"]), anything))
def test_any_mapping_builds_or_is_refused(values: dict[str, Any]) -> None:
    try:
        settings = build(Outer, values)
    except UserError as error:
        assert str(error)
    else:
        assert build(Outer, to_dict(settings)) == settings


def test_numbers_must_be_finite_and_tuples_have_their_length() -> None:
    assert convert_finite(float, 2, "x") == 2.0
    for value in (math.nan, math.inf):
        with pytest.raises(UserError, match="x must be a finite number, got"):
            convert_finite(float, value, "x")
    assert convert(tuple[int, int], [1, 2], "x") == (1, 2)
    with pytest.raises(UserError, match="x must have 2 values, got 1"):
        convert(tuple[int, int], [1], "x")
