"""Paired bootstrap over pooled seeds."""

import random
from pathlib import Path
from typing import get_args

import pytest

from reluformer.errors import UserError
from reluformer.evaluation.aligned_files import read_aligned
from reluformer.evaluation.results import Level
from reluformer.evaluation.scores import evaluate
from reluformer.files import write_text
from reluformer.study.counts import Counts, load_counts, save_counts
from reluformer.study.finishing import score
from reluformer.study.significance import pooled_bootstrap


def _corrupted(texts: list[str], share: float, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join("x" if rng.random() < share else w for w in t.split()) for t in texts]


def _counts(folder: Path, reference: list[str], system: list[str]) -> Counts | None:
    folder.mkdir()
    write_text(folder / "target", "".join(f"{line}\n" for line in reference))
    write_text(folder / "test.hypothesis", "".join(f"{line}\n" for line in system))
    _, counts = score(folder / "target", folder / "test.hypothesis", documents=False)
    save_counts(folder, "test", counts)
    return load_counts(folder, "test", "sentence")


def test_clear_differences_are_found_and_none_is_invented(tmp_path: Path) -> None:
    rng = random.Random(0)
    reference = [" ".join(rng.choices("abcdefgh", k=12)) for _ in range(40)]
    good, bad = (
        [
            _counts(tmp_path / str(seed), reference, _corrupted(reference, share, seed))
            for seed in seeds
        ]
        for share, seeds in ((0.1, (1, 2)), (0.3, (3, 4)))
    )
    found = pooled_bootstrap(good, bad, 200)
    assert found is not None
    assert found.difference > 5 and found.interval[0] > 0 and found.p_value < 0.05
    assert "nrefs:1" in found.signature
    same = pooled_bootstrap(good, good[::-1], 200)
    assert same is not None
    assert same.difference == 0 and same.interval == (0, 0) and same.p_value == 1
    assert pooled_bootstrap([*good, None], bad, 200) is None
    part = _counts(tmp_path / "part", reference[:7], reference[:7])
    assert pooled_bootstrap([part], bad, 200) is None


def test_counts_by_document_and_damaged_files(tmp_path: Path) -> None:
    write_text(tmp_path / "target", "<d>\na b c d e\nf g h i j\n<d>\nk l m n o\n")
    write_text(tmp_path / "test.hypothesis", "<d>\na b c d e\nf g h i x\n<d>\nk l m n o\n")
    files = (tmp_path / "target", tmp_path / "test.hypothesis")
    scores, extracted = score(*files, documents=True)
    save_counts(tmp_path, "test", extracted)
    lengths = {
        level: counts.table[:, 0].tolist()
        for level in get_args(Level)
        if (counts := load_counts(tmp_path, "test", level)) is not None
    }
    right, (system,) = read_aligned(files[0], [files[1]], documents=True)
    evaluated = evaluate(right, {"system": system}, documents=True).systems[0]
    wanted = evaluated.scores
    assert scores["d-BLEU"].pop("by_length") == [
        {**group._asdict(), "value": round(group.value, 2)} for group in evaluated.by_length
    ]
    assert scores == {
        f"{'d-' if one.level == 'document' else ''}{one.name}": {
            "value": round(one.value, 2),
            "signature": one.signature,
        }
        for one in wanted
        if one.case == "mixed" and one.name != "TER"
    }
    assert lengths == {"sentence": [5, 5, 5], "document": [10, 5]}
    assert load_counts(tmp_path, "other", "sentence") is None
    whole = (tmp_path / "test.counts.npz").read_bytes()
    # The last has a whole directory behind a broken array.
    for content in (b"PK nothing", b"", whole[:100], whole[:60] + bytes(20) + whole[80:]):
        (tmp_path / "test.counts.npz").write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            load_counts(tmp_path, "test", "sentence")
