"""Problems for tests of the host code."""

from collections.abc import Mapping
from typing import Any

from reluformer.ops.backends.triton.problem import Problem, Settings


def with_changes(problem: Problem, changes: Mapping[str, Any]) -> Problem:
    """The problem with other optional inputs or settings, by the names of their fields."""
    settings = {name: value for name, value in changes.items() if name in Settings._fields}
    optional = {name: value for name, value in changes.items() if name not in settings}
    return problem._replace(
        optional=problem.optional._replace(**optional),
        settings=problem.settings._replace(**settings),
    )
