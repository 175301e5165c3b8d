"""The command `info`."""

import json
from typing import Any

from reluformer.cli.options import Json


def info(json_: Json = False) -> None:
    """Print versions, devices and implementations."""
    from reluformer.info import info as gather

    topics = gather()
    if json_:
        print(json.dumps(topics, indent=2))
        return
    for topic, value in topics.items():
        _show(topic, value)


def _show(topic: str, value: Any, indent: str = "") -> None:
    """Print a topic on one line, or a line for each entry of a mapping."""
    if isinstance(value, dict):
        print(f"{indent}{topic}:")
        for name, detail in value.items():
            _show(name, detail, indent + "  ")
    else:
        print(f"{indent}{topic}: {_plain(value)}")


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not installed" if value is None else str(value)
