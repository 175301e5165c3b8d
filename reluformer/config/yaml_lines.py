"""YAML with line numbers: where each field of a file stands, and errors that say so."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from reluformer.errors import UserError


@dataclass(frozen=True)
class Document:
    """A YAML file: its values, and the line of each field by dotted path (`train.lr`)."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[str, int]

    def located(self, error: UserError, assigned: Mapping[str, Any]) -> UserError:
        """`error`, whose message begins with a field, with the place of that field in front.

        `assigned` are the fields that were set outside the file.
        """
        field = str(error).split(" ", 1)[0]
        for path in _and_parents(field):
            if path in assigned:
                return UserError(f"--set {path}={assigned[path]}: {error}")
            if path in self.lines:
                return UserError(f"{self.path}, line {self.lines[path]}: {error}")
        return UserError(f"{self.path}: {error}")


def read(path: Path) -> Document:
    """Read a YAML mapping; a field given twice is refused, where YAML would keep the last."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{path} must hold a mapping of fields")
        lines = _lines(path, node)
        values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{path}{place} is not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    return Document(path, values, lines)


def assignments(texts: Sequence[str]) -> dict[str, Any]:
    """`["train.lr=1e-3", ...]` as values by dotted path, each read as YAML."""
    values: dict[str, Any] = {}
    for text in texts:
        field, equals, value = text.partition("=")
        if not equals or not all(field.split(".")):
            raise UserError(f"--set {text} must have the form section.field=value")
        try:
            values[field] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"--set {text} has a value that is not valid YAML") from None
    return values


def _lines(path: Path, node: yaml.MappingNode) -> dict[str, int]:
    lines: dict[str, int] = {}
    for field, line in _fields(node, ""):
        if field in lines:
            raise UserError(
                f"{path}, line {line}: {field} is given twice, first in line {lines[field]}"
            )
        lines[field] = line
    return lines


def _fields(node: yaml.MappingNode, parent: str) -> Iterator[tuple[str, int]]:
    for key, value in node.value:
        field = f"{parent}.{key.value}" if parent else str(key.value)
        yield field, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _fields(value, field)


def _and_parents(field: str) -> Iterator[str]:
    parts = field.split("[", 1)[0].split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])
