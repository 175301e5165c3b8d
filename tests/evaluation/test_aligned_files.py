"""Reading of references and hypotheses: alignment and its errors."""

import gzip
from pathlib import Path

import pytest

from reluformer.errors import UserError
from reluformer.evaluation.aligned_files import read_aligned
from tests.evaluation.texts import flat


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_files_are_aligned_with_or_without_document_marks(tmp_path: Path) -> None:
    reference = write(tmp_path / "ref", "<d>", "a", "b", "", "c")
    marked = write(tmp_path / "marked", "", "A", "", "<d>", "C")
    plain = write(tmp_path / "plain", "A", "B", "C")
    for documents, expected in ((True, [["a", "b"], ["c"]]), (False, [["a"], ["b"], ["c"]])):
        wanted, found = read_aligned(reference, [marked, plain], documents=documents)
        assert wanted == expected
        assert found[1] == [[s.upper() for s in group] for group in expected]
        assert flat(found[0]) == ["A", "", "C"]


def test_files_that_do_not_align_are_refused(tmp_path: Path) -> None:
    reference = write(tmp_path / "ref", "<d>", "a", "b")
    with pytest.raises(UserError, match=r"short has 1 lines, but .*ref has 3, of which 2"):
        read_aligned(reference, [write(tmp_path / "short", "A")])
    with pytest.raises(UserError, match="odd, line 1 is a sentence"):
        read_aligned(reference, [write(tmp_path / "odd", "A", "B", "C")])
    with pytest.raises(UserError, match="mark, line 2 is <d>"):
        read_aligned(reference, [write(tmp_path / "mark", "<d>", "<d>", "C")])
    with pytest.raises(UserError, match="separate documents"):
        read_aligned(write(tmp_path / "flat", "a"), [], documents=True)
    with pytest.raises(UserError, match="no sentence"):
        read_aligned(write(tmp_path / "empty"), [])
    with pytest.raises(UserError, match="cannot be read"):
        read_aligned(reference, [tmp_path / "missing"])


def test_a_file_that_expands_without_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reluformer.evaluation.aligned_files._MOST_BYTES", 2**20)
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(b"a b\n" * 10**6))
    with pytest.raises(UserError, match="bomb.gz needs more than 1 MiB of memory"):
        read_aligned(bomb, [])
