"""What the README shows: its code runs, its table is the family, its commands exist."""

import re
import shlex
from pathlib import Path

import pytest

from reluformer import ATTENTIONS, recipes

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    calls = [part.strip() for line in lines for part in line.split("|")]
    return [shlex.split(call, comments=True) for call in calls if call.startswith("reluformer ")]


@pytest.mark.parametrize("code", blocks("python"))
def test_code_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_the_table_is_the_family() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", README, flags=re.MULTILINE)
    shown = {name: (formula.replace("\\|", "|"), paper) for name, formula, paper in rows}
    assert shown == {a.name: (a.formula, a.paper) for a in ATTENTIONS.values()}


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[:2]))
def test_commands_and_their_options_exist(words: list[str]) -> None:
    import typer

    from reluformer.cli import app

    command = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    if words[1] == "train":
        assert words[2] in recipes.names()
