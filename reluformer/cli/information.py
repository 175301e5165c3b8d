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
        if isinstance(value, dict):
            print(f"{topic}:")
            for name, detail in value.items():
                print(f"  {name}: {_plain(detail)}")
        else:
            print(f"{topic}: {_plain(value)}")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {detail}" for name, detail in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not installed" if value is None else str(value)
