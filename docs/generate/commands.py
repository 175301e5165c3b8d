"""The command-line reference, from the typer application itself."""

from typing import Any

import typer

from reluformer.cli import app


def commands() -> dict[str, Any]:
    """Every command by name, in the order of `reluformer --help`."""
    group = typer.main.get_command(app)
    return dict(group.commands)  # type: ignore[attr-defined]


def markdown() -> str:
    """One section for each command: usage, arguments, options."""
    return "\n\n".join(_section(name, command) for name, command in commands().items())


def _section(name: str, command: Any) -> str:
    context = typer.Context(command, info_name=f"reluformer {name}")
    usage = command.get_usage(context).removeprefix("Usage: ")
    parts = [f"## {name}", (command.help or "").strip(), f"```text\n{' '.join(usage.split())}\n```"]
    visible = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [p for p in visible if p.param_type_name == "argument"]
    options = [p for p in visible if p.param_type_name == "option"]
    if arguments:
        parts.append(_table("argument", [(f"`{p.name}`", _text(p)) for p in arguments]))
    if options:
        parts.append(_table("option", [(_names(p, context), _text(p)) for p in options]))
    return "\n\n".join(parts)


def _names(option: Any, context: typer.Context) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    if getattr(option, "is_flag", False):
        return names
    metavar = option.make_metavar(context).strip("<>").replace("|", " or ")
    return f"{names} `{metavar}`"


def _text(parameter: Any) -> str:
    text = (getattr(parameter, "help", None) or "").strip()
    if parameter.required:
        text += " Required."
    default = parameter.default
    if isinstance(default, (int, float, str)) and not isinstance(default, bool):
        text += f" Default: `{default}`."
    return text.strip().replace("|", "\\|")


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {left} | {right} |" for left, right in rows]
    return "\n".join([f"| {title} | meaning |", "|---|---|", *lines])
