"""The demonstration runs from end to end, with a tiny model in place of the shipped one."""

import shutil
from pathlib import Path

import pytest

from reluformer.demo import _program, demo
from reluformer.shipped import DEMO_DOCUMENT, SHIPPED_FOLDER, TEST_REFERENCE, TEST_SOURCE
from tests.serve.tiny import tiny_model


def test_the_demonstration_translates_scores_and_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(tmp_path)
    for name in (TEST_SOURCE, TEST_REFERENCE):
        shutil.copy(SHIPPED_FOLDER / name, tmp_path)
    (tmp_path / DEMO_DOCUMENT).write_text("The cat sat. It left.\n\nIt rains.\n", "utf-8")
    demo(tmp_path)
    out = capsys.readouterr().out
    for part in ("The cat sat.\n", "It rains.\n", "chrF2", "tok:13a", "per second", "serve"):
        assert part in out
    assert out.count("German  ") == 3
    shares = [
        int(word.strip(",.;").rstrip("%")) for word in out.split() if word.strip(",.;")[-1:] == "%"
    ]
    # A random ReLU model without threshold has zeros in every attention.
    assert all(0 < share < 100 for share in shares[:3])


def test_commands_can_be_copied_without_an_active_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reluformer").touch(mode=0o755)
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nonexistent")
    assert _program() == f"{tmp_path.name}/reluformer"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _program() == "reluformer"


def test_the_documents_of_the_package_are_aligned() -> None:
    source, reference = (
        (SHIPPED_FOLDER / name).read_text("utf-8").splitlines()
        for name in (TEST_SOURCE, TEST_REFERENCE)
    )
    assert len(source) == len(reference) == 12
    assert all(line and line == line.strip() and line.endswith(".") for line in source + reference)
