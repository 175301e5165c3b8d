"""Recipes shipped with the package: one YAML file for each, found by name."""

from pathlib import Path

from reluformer.errors import UserError

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Names of the shipped recipes, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def path(name: str) -> Path:
    """Return the file of the shipped recipe `name`.

    Raises:
        UserError: There is no shipped recipe of that name.
    """
    if name not in names():
        raise UserError(f"recipe must be one of {', '.join(names())}, or a YAML file, got {name!r}")
    return _FOLDER / f"{name}.yaml"


def summary(name: str) -> str:
    """First sentence of the comment at the top of the shipped recipe `name`."""
    lines = path(name).read_text(encoding="utf-8").splitlines()
    header: list[str] = []
    for line in lines:
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or not text:
            break
        header.append(text)
    return " ".join(header).split(". ")[0].rstrip(".") + "."
