"""YAML files with the line number of each field, for error messages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from reluformer.errors import UserError


@dataclass(frozen=True)
class YamlFile:
    """Content of a YAML file."""

    path: Path
    values: dict[str, Any]
    """Nested plain values."""
    lines: Mapping[str, int]
    """Line number of each field, by dotted path (`train.lr`)."""

    def located(self, error: UserError, assigned: Mapping[str, Any]) -> UserError:
        """Prepend the line of the field that the error's message begins with.

        Args:
            error: An error whose first word is the dotted path of a field.
            assigned: Fields that were assigned with `--set`; their errors name the assignment.
        """
        field = str(error).split(" ", 1)[0]
        for path in _and_parents(field):
            if path in assigned:
                return UserError(f"--set {path}={assigned[path]}: {error}")
            if path in self.lines:
                return UserError(f"{self.path}, line {self.lines[path]}: {error}")
        return UserError(f"{self.path}: {error}")


def read_yaml(path: Path) -> YamlFile:
    """Read a YAML mapping; repeated fields are refused, although YAML would keep the last."""
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
            raise UserError(f"{path} must contain a mapping of fields")
        lines = _lines(path, node)
        values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{path}{place} is not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    return YamlFile(path, values, lines)


def parse_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Values by dotted path of assignments such as `"train.lr=1e-3"`; values are YAML."""
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
