"""The table of all modules, from the first lines of their docstrings."""

import ast
from itertools import groupby
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "reluformer"


def modules() -> dict[str, str]:
    """Path of every module below the package, in reading order, with its summary."""
    paths = sorted(PACKAGE.rglob("*.py"), key=lambda path: (path.parent, path))
    rows = {str(path.relative_to(PACKAGE)): _summary(path) for path in paths}
    # An `__init__.py` without a docstring only marks a folder.
    return {name: text for name, text in rows.items() if text or not name.endswith("__init__.py")}


def markdown() -> str:
    """One table for each folder."""
    parts = []
    for folder, rows in groupby(modules().items(), key=lambda row: str(Path(row[0]).parent)):
        title = "reluformer" if folder == "." else f"reluformer/{folder}"
        lines = [f"| `{Path(name).name}` | {text} |" for name, text in rows]
        parts.append("\n".join([f"**`{title}`**", "", "| module | purpose |", "|---|---|", *lines]))
    return "\n\n".join(parts)


def count() -> str:
    """Number of modules, packages included."""
    return str(len(modules()))


def _summary(path: Path) -> str:
    """First paragraph of the module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")
