"""YAML files with the line number of each field, for error messages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from reluformer.errors import UserError, shorten
from reluformer.reading import read_text

# A recipe has about 100 values in 3,000 bytes. PyYAML reads 50,000 bytes per second.
_LIMIT, _NODES = 2**16, 10_000
# PyYAML passes on the errors of Python's conversions, as for the date 2026-99-99.
_CONVERSIONS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


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
                return UserError(f"--set {path}={shorten(assigned[path])}: {error}")
            if path in self.lines:
                return UserError(f"{self.path}, line {self.lines[path]}: {error}")
        return UserError(f"{self.path}: {error}")


def read_yaml(path: Path, *, allow_pipe: bool = False) -> YamlFile:
    """Read a YAML mapping; repeated fields are refused, although YAML would keep the last."""
    node, values = _read_mapping(path, allow_pipe)
    return YamlFile(path, values, _lines(path, node))


def read_yaml_values(path: Path, *, allow_pipe: bool = False) -> dict[str, Any]:
    """The values of a YAML mapping, in which fields may override those that they merge (`<<`)."""
    return _read_mapping(path, allow_pipe)[1]


def parse_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Values by dotted path of assignments such as `"train.lr=1e-3"`; values are YAML."""
    values: dict[str, Any] = {}
    for text in texts:
        field, equals, value = text.partition("=")
        if not equals or not all(field.split(".")):
            raise UserError(f"--set {text[:80]} must have the form section.field=value")
        try:
            values[field] = _parse(value, "value")[1]
        except UserError as error:
            raise UserError(f"--set {text[:80]} has a bad value: {error}") from None
    return values


def _read_mapping(path: Path, allow_pipe: bool) -> tuple[yaml.MappingNode, dict[str, Any]]:
    node, values = _parse(read_text(path, _LIMIT, allow_pipe=allow_pipe), str(path))
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path} must contain a mapping of fields")
    return node, values


def _parse(text: str, name: str) -> tuple[yaml.Node | None, Any]:
    """Root node and value of a YAML text; errors name `name`."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        if _expanded_size(node) > _NODES:
            raise UserError(f"{name} must have at most {_NODES:,} values, with aliases expanded")
        return node, loader.construct_document(node)
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{name}{place} is not valid YAML: {error.problem}") from None
    except RecursionError:
        raise UserError(f"{name} is nested too deeply") from None
    except (
        yaml.YAMLError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{name} is not valid YAML: {reason}") from None


def _expanded_size(root: yaml.Node) -> int:
    """Number of nodes with every alias replaced by a copy of its node; cycles are refused."""
    sizes: dict[int, int | None] = {}

    def measure(node: yaml.Node) -> int:
        if id(node) in sizes:
            size = sizes[id(node)]
            if size is None:
                raise UserError("a YAML alias must not refer to a node that contains it")
            return size
        sizes[id(node)] = None
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in children for part in pair]
        size = 1 + sum(map(measure, children))
        sizes[id(node)] = size
        return size

    return measure(root)


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
