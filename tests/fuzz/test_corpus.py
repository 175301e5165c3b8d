"""The stored corpus of hostile files: each is loaded, or refused in a sentence.

`make_corpus.py` wrote most of them. A file that once broke the package stays here.
"""

import shutil
from pathlib import Path

import pytest

from tests.fuzz.conftest import refusal
from tests.fuzz.targets import BINARY, STRUCTURED, TEXT

CORPUS = Path(__file__).parent / "corpus"
TARGETS = STRUCTURED | BINARY
STORED = sorted(path.relative_to(CORPUS) for path in CORPUS.glob("*/*"))


def _ids(path: Path) -> str:
    return str(path)


@pytest.mark.parametrize("stored", [p for p in STORED if p.parts[0] != "text"], ids=_ids)
def test_files_of_folders(folder: Path, stored: Path) -> None:
    name = stored.parts[0].replace("__", "/")
    shutil.copy(CORPUS / stored, folder / name)
    refusal(lambda: TARGETS[name](folder / name))


@pytest.mark.parametrize("reader", TEXT)
@pytest.mark.parametrize("stored", [p for p in STORED if p.parts[0] == "text"], ids=_ids)
def test_text(tmp_path: Path, stored: Path, reader: str) -> None:
    path = Path(shutil.copy(CORPUS / stored, tmp_path))
    refusal(lambda: TEXT[reader](path))


def test_the_corpus_has_every_kind_of_file() -> None:
    kinds = {path.parts[0].replace("__", "/") for path in STORED}
    assert kinds == {*TARGETS, "text"}
    assert len(STORED) >= 100
    assert sum((CORPUS / path).stat().st_size for path in STORED) < 2**20
