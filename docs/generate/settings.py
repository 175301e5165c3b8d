"""The reference of recipe settings, from the dataclasses that check a recipe."""

import ast
import dataclasses
import inspect
import types
import typing
from typing import Any

from reluformer.config.recipe import Recipe

FROM_TOKENIZER = ("vocabulary", "pad_id", "bos_id", "eos_id")


def markdown() -> str:
    """One table for each section of a recipe, nested sections after their parent."""
    sections = []
    for name, config in _sections(Recipe, ""):
        rows = [
            f"| `{field.name}` | {_kind(hints)} | {_default(field)} | {text} |"
            for field, hints, text in _settings(config)
        ]
        if rows:
            head = [f"## {name}", "", _summary(config), ""]
            head += ["| setting | type | default | meaning |", "|---|---|---|---|"]
            sections.append("\n".join([*head, *rows]))
    return "\n\n".join(sections)


def names() -> set[str]:
    """Full names of all settings, such as `train.lr`."""
    return {
        f"{name}.{field.name}"
        for name, config in _sections(Recipe, "")
        for field, _, _ in _settings(config)
    }


def _sections(config: type, prefix: str) -> list[tuple[str, type]]:
    """Dataclasses of a recipe by the name of their section; the first with a type is listed."""
    found: list[tuple[str, type]] = []
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        nested = _nested(hints[field.name])
        # Attentions of single sites have the settings of `model.attention`.
        if nested is not None and nested not in [known for _, known in found]:
            name = f"{prefix}{field.name}"
            found += [(name, nested), *_sections(nested, f"{name}.")]
    return found


def _settings(config: type) -> list[tuple[dataclasses.Field[Any], Any, str]]:
    """Fields that are no section, with type and docstring."""
    hints, texts = typing.get_type_hints(config), _docstrings(config)
    return [
        (field, hints[field.name], texts.get(field.name, ""))
        for field in dataclasses.fields(config)
        if _nested(hints[field.name]) is None and field.name not in FROM_TOKENIZER
    ]


def _nested(hint: Any) -> type | None:
    """The dataclass that a field holds, if it holds one."""
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def _docstrings(config: type) -> dict[str, str]:
    """String literals that follow the fields of a class, on one line each."""
    body = ast.parse(inspect.getsource(config)).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for statement, following in zip(body, body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            text = " ".join(str(following.value.value).split())
            texts[statement.target.id] = text.replace("|", "\\|")  # type: ignore[union-attr]
    return texts


def _summary(config: type) -> str:
    return (config.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _is_union(hint: Any) -> bool:
    # `Literal[...] | None` is a typing.Union.
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _kind(hint: Any) -> str:
    if _is_union(hint):
        parts = [_kind(option) for option in typing.get_args(hint) if option is not type(None)]
        return " or ".join(parts)
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
        getattr(hint, "__name__", ""), "list" if typing.get_origin(hint) is tuple else "mapping"
    )


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else "empty"
    if isinstance(field.default, tuple):
        return f"`{list(field.default)}`"
    if field.default is None or isinstance(field.default, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[field.default]
    return f"`{field.default}`"
