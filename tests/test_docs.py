"""README and docs: code blocks run, commands exist, generated parts are complete, links resolve.

A Python block runs in the namespace of the blocks above it on the same page, in an empty folder. A
comment before a block changes that: `<!-- not executed: REASON -->` only compiles it, and
`<!-- uses runs/mine -->` provides the folder of a finished run.
"""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
import typer

import reluformer.context_parallel
import reluformer.hf
import reluformer.nn
from reluformer import ATTENTIONS
from reluformer.cli import app
from reluformer.config.recipe import load_recipe
from reluformer.model.memory import MEMORIES
from reluformer.train import train

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
GENERATED = ROOT / "docs" / "generate"
_BLOCK = re.compile(r"(?:<!-- ([^>]*) -->\n)?```(\w+)\n(.*?)```", flags=re.DOTALL)
_SHORT_RUN = (
    "train.steps=2",
    "train.warmup=1",
    "train.dev_every=2",
    "train.bleu_every=2",
    "train.checkpoint_every=2",
    "data.generated.train=200",
    "data.generated.dev=8",
    "model.width=16",
)


class Block(NamedTuple):
    """A fenced block of a page, with the comment in the line before it."""

    note: str
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [Block(*match.groups(default="")) for match in _BLOCK.finditer(page.read_text("utf-8"))]


def commands() -> list[tuple[str, list[str]]]:
    """Every call of `reluformer` in a shell block, with its page, split into words."""
    calls = []
    for page in PAGES:
        for block in blocks(page):
            text = block.code.replace("\\\n", " ") if block.language == "sh" else ""
            parts = [part.strip() for line in text.splitlines() for part in line.split("|")]
            calls += [
                (page.name, shlex.split(part.split(" < ")[0].split(" > ")[0], comments=True))
                for part in parts
                if part.startswith("reluformer ")
            ]
    return calls


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that was trained for two steps."""
    folder = tmp_path_factory.mktemp("docs") / "mine"
    train(load_recipe("toy-reverse", _SHORT_RUN), folder, quiet=True)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    python = [block for block in blocks(page) if block.language == "python"]
    if page.name == "context-parallel.md":
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        request.addfinalizer(dist.destroy_process_group)
    for block in python:
        code = compile(block.code, str(page), "exec")
        if block.note.startswith("not executed:"):
            continue
        if block.note == "uses runs/mine":
            (tmp_path / "runs").mkdir(exist_ok=True)
            (tmp_path / "runs" / "mine").symlink_to(request.getfixturevalue("finished_run"))
        exec(code, names)


@pytest.mark.parametrize(
    ("page", "words"),
    commands(),
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else value,
)
def test_commands_and_their_options_exist(page: str, words: list[str]) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    if words[1].startswith("-"):
        return
    assert words[1] in known
    options = {option for parameter in known[words[1]].params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options
    if words[1] == "train":
        settings = [value for word, value in zip(words, words[1:], strict=False) if word == "--set"]
        # Settings that name a file or an attention of an example cannot be checked here.
        load_recipe(words[2], [s for s in settings if not s.endswith("=gelu_n")])


def test_links_to_files_of_the_repository_resolve() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8")):
            is_generated = target.startswith("gallery/")
            assert is_generated or (page.parent / target).exists(), f"{page.name}: {target}"


def test_named_files_exist() -> None:
    roots = [ROOT, ROOT / "reluformer", ROOT / "reluformer" / "ops" / "backends"]
    # The log tells of files as they were at its dates.
    for page in (page for page in PAGES if page.name != "log.md"):
        for path in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|yaml|h|md))`", page.read_text("utf-8")):
            assert any((root / path).exists() for root in roots), f"{page.name}: {path}"


def test_the_index_of_the_log_has_every_entry_once() -> None:
    text = (ROOT / "docs" / "log.md").read_text("utf-8")
    index = text[text.index("## Index") : text.index("\n## 20")]
    listed = re.findall(r"^- [\d-]+: \[(.*)\]\(#.*\)$", index, flags=re.MULTILINE)
    entries = re.findall(r"^## 20[\d-]+: (.*)$", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(entries)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130


def test_gallery_shows_every_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GENERATED))
    import gallery

    text = gallery.markdown()
    for name, row in ATTENTIONS.items():
        assert f"### {name}\n" in text
        assert row.paper in text
    plots = gallery.plots()
    assert set(ATTENTIONS) <= set(plots)
    assert all(svg.startswith("<svg") and "nan" not in svg for svg in plots.values())


def test_gallery_plots_are_the_weight_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GENERATED))
    import gallery

    scores, weights = gallery.curve("relu")
    expected = [max(s, 0) / (gallery.KEYS / 2) ** 0.5 for s in scores]
    assert weights == pytest.approx(expected, abs=1e-6)


def test_gallery_describes_only_members_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GENERATED))
    import gallery

    described = {name for group in gallery.notes().values() for name in group["members"]}
    assert described == set(ATTENTIONS)


def test_memory_table_lists_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GENERATED))
    import memories

    text = memories.markdown()
    assert all(f"| `{name}` |" in text and row.paper in text for name, row in MEMORIES.items())


def test_module_table_lists_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GENERATED))
    import modules

    package = ROOT / "reluformer"
    text, summaries = modules.markdown(), modules.modules()
    for path in package.rglob("*.py"):
        name = str(path.relative_to(package))
        if path.name != "__init__.py":
            assert summaries[name], f"{name} has no docstring"
            assert f"| `{path.name}` |" in text
    titles = re.findall(r"^\*\*`(.*)`\*\*$", text, flags=re.MULTILINE)
    assert sorted(set(titles)) == sorted(titles), "a folder has two tables"


def test_command_reference_lists_every_command_and_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GENERATED))
    import commands as reference

    sections = dict(re.findall(r"## (\S+)\n(.*?)(?=\n## |\Z)", reference.markdown(), re.DOTALL))
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert list(sections) == list(known)
    for name, command in known.items():
        for parameter in command.params:
            for option in parameter.opts:
                assert f"`{option}`" in sections[name]


def test_settings_on_the_pages_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GENERATED))
    import settings

    assert "|  |" not in settings.markdown(), "a setting has no docstring"
    assert "| `precision` | `float32`, `bfloat16` | `null` |" in settings.markdown()
    known = settings.names()
    known |= {name.rsplit(".", 1)[0] for name in known}
    # The log names settings as they were at its dates.
    for page in (page for page in PAGES if page.name != "log.md"):
        text = page.read_text("utf-8")
        for name in re.findall(r"`((?:data|model|train|decode)\.[a-z_.]+)(?::[^`]*)?`", text):
            assert name in known or name.endswith((".py", ".yaml")), f"{page.name}: {name}"


def test_recipe_page_lists_every_recipe() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text("utf-8")
    shipped = {path.stem for path in (ROOT / "reluformer" / "recipes").glob("*.yaml")}
    assert set(re.findall(r"recipes/([\w-]+)\.yaml", text)) == shipped


def test_api_page_lists_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    shown = set(re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE))
    for module in (reluformer, reluformer.nn, reluformer.hf, reluformer.context_parallel):
        names = {f"{module.__name__}.{name}" for name in module.__all__}
        assert names - shown <= {"reluformer.ATTENTIONS", "reluformer.__version__"}


def test_every_dependency_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    needed = {re.split(r"[<>=\[]", line)[0] for group in extras for line in group}
    needed |= {re.split(r"[<>=\[]", line)[0] for line in project["dependencies"]}
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = text[text.index("## Dependencies") :]
    assert [name for name in sorted(needed) if name not in table] == []


def test_numbers_are_those_of_the_results_files() -> None:
    script = ROOT / "tools" / "check_numbers.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:]
