"""Dataclasses from nested plain values (YAML, JSON) and back, checked field by field.

Every error is one sentence with the full path of the field (`model.attention.kind`), its value and
what is allowed. The only conversions are between kinds of numbers, and from text to numbers,
because YAML reads `1e-3` as text.
"""

import dataclasses
import difflib
import math
import numbers
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from reluformer.config.migration import RENAMED_FIELDS
from reluformer.errors import UserError, quote, shorten

T = TypeVar("T")

# Whole numbers beyond 64 bits overflow in torch and in numpy.
_LARGEST = 2**63 - 1


def build(cls: type[T], values: Any, path: str = "") -> T:
    """Build an instance of the dataclass `cls` from a mapping.

    Args:
        cls: A dataclass, whose fields may be dataclasses too.
        values: Mapping from field names to values.
        path: Name of the instance in error messages, such as `model.attention`.

    Raises:
        UserError: A field is unknown, missing, or has a wrong type or value.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{path or 'settings'} must be a mapping of fields, got {_show(values)}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise UserError(_unknown(_join(path, str(key)), str(key), list(fields)))
    converted = {k: convert(hints[k], value, _join(path, k)) for k, value in values.items()}
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in converted:
            raise UserError(f"{_join(path, name)} is required")
    try:
        return cls(**converted)
    except UserError as error:
        raise UserError(f"{path}.{error}" if path else str(error)) from None


def check_fields(settings: Any) -> None:
    """Check the fields of a dataclass against their annotations, and convert numbers.

    Configuration classes call this first in `__post_init__`, so that an instance is valid however
    it was built.

    Raises:
        UserError: A field has a wrong type, an unknown choice, or is infinite or NaN.
    """
    for name, hint in typing.get_type_hints(type(settings)).items():
        if typing.get_origin(hint) is typing.ClassVar:
            continue
        object.__setattr__(settings, name, convert_finite(hint, getattr(settings, name), name))


def convert_finite(hint: Any, value: Any, path: str) -> Any:
    """Like `convert`, and refuse infinity and NaN."""
    value = convert(hint, value, path)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{path} must be a finite number, got {value}")
    return value


def convert(hint: Any, value: Any, path: str) -> Any:
    """Check that `value` has the type `hint` and convert it; errors name `path`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast(type, hint)):
            return value
        return build(typing.cast(type, hint), value, path)
    if origin is Literal:
        if any(type(value) is type(a) and value == a for a in arguments):
            return value
        allowed = ", ".join(str(a) for a in arguments)
        raise UserError(f"{path} must be one of {allowed}, got {_show(value)}")
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, path)
    if origin in (list, tuple):
        return _convert_sequence(origin, arguments, value, path)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{path} must be a mapping, got {_show(value)}")
        return {k: convert(arguments[1], item, _join(path, str(k))) for k, item in value.items()}
    return _convert_scalar(hint, value, path)


def override(values: Mapping[str, Any], assignments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy nested `values` and assign fields by dotted path (`train.lr`)."""
    result = _copy(values)
    for dotted, value in assignments.items():
        *parents, last = dotted.split(".")
        inner = result
        for position, parent in enumerate(parents):
            child = inner.setdefault(parent, {})
            if not isinstance(child, dict):
                raise UserError(f"{'.'.join(parents[: position + 1])} is a value, not a section")
            inner = child
        inner[last] = value
    return result


def to_dict(settings: Any) -> dict[str, Any]:
    """Nested plain values of a dataclass; `build` restores an equal one from them."""
    return {key: _plain(value) for key, value in dataclasses.asdict(settings).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _convert_union(arguments: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    choices = [a for a in arguments if a is not type(None)]
    if len(choices) == 1:
        return convert(choices[0], value, path)
    for choice in choices:
        try:
            return convert(choice, value, path)
        except UserError:
            continue
    allowed = ", ".join(getattr(a, "__name__", str(a)) for a in arguments)
    raise UserError(f"{path} must be one of the types {allowed}, got {_show(value)}")


def _convert_sequence(origin: Any, arguments: tuple[Any, ...], value: Any, path: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{path} must be a list, got {_show(value)}")
    if origin is tuple and Ellipsis not in arguments and len(value) != len(arguments):
        raise UserError(f"{path} must have {len(arguments)} values, got {len(value)}")
    items = [convert(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value)]
    return origin(items)


def _convert_scalar(hint: Any, value: Any, path: str) -> Any:
    names = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
    wrong = UserError(f"{path} must be {names.get(hint, str(hint))}, got {_show(value)}")
    is_bool = type(value) is bool
    if hint is int and isinstance(value, numbers.Integral) and not is_bool:
        if abs(int(value)) > _LARGEST:
            raise UserError(f"{path} must be between -2^63 and 2^63, got {_show(value)}")
        return int(value)
    if hint is float and isinstance(value, (str, numbers.Real)) and not is_bool:
        # YAML 1.1 reads 1e-3, without a dot, as text.
        try:
            return float(value)
        except (ValueError, OverflowError):
            raise wrong from None
    if type(value) is hint:
        return value
    raise wrong


def _unknown(path: str, key: str, known: list[str]) -> str:
    renamed = RENAMED_FIELDS.get(key)
    close = [renamed] if renamed in known else difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{path} is not a known field; {hint}known: {', '.join(sorted(known))}"


def _join(path: str, name: str) -> str:
    """Dotted path of a field; a name from a file is shortened, and escaped for the terminal."""
    shown = name if name.isprintable() and len(name) <= 80 else repr(shorten(name))
    return f"{path}.{shown}" if path else shown


def _show(value: Any) -> str:
    """The value, quoted if it is text, and its type."""
    if value is None:
        return "nothing"
    return f"{quote(value)} ({type(value).__name__})"


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in values.items()}
