"""Scores and decoding of the shipped model are measured and compared, with a tiny model."""

import contextlib
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    length_penalty,
    model_card,
    native_agreement,
    shipped_context,
    shipped_decoding,
)
from reluformer.model import ReLUFormer
from reluformer.quantise import quantise_run
from reluformer.shipped import SHIPPED_FOLDER, TEST_REFERENCE, TEST_SOURCE
from reluformer.translation.search import Hypothesis, search
from tests.serve.tiny import tiny_model
from tests.translation.native.conftest import kernels, native  # noqa: F401


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model in int8, with the documents of the shipped one."""
    tiny_model(tmp_path / "float32")
    quantise_run(tmp_path / "float32", tmp_path / "int8")
    for name in (TEST_SOURCE, TEST_REFERENCE):
        shutil.copy(SHIPPED_FOLDER / name, tmp_path / "int8")
    return tmp_path / "int8"


def prepared(folder: Path) -> Path:
    """Text files as `reluformer prepare` writes them."""
    folder.mkdir()
    for split in ("dev", "test", "test.long"):
        (folder / f"{split}.source.txt").write_text("<d>\nOne here.\nTwo.\n<d>\nThree.\n", "utf-8")
        (folder / f"{split}.target.txt").write_text("<d>\nEins hier.\nZwei.\n<d>\nDrei.\n", "utf-8")
    return folder


@pytest.mark.slow
def test_scores_are_reproduced_to_the_last_digit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = prepared(tmp_path / "data"), tmp_path / "result.json"
    europarl = model_card.europarl(data)
    # The tiny model was trained on shorter texts.
    short = [test._replace(max_length=test.max_length and 32) for test in europarl]
    monkeypatch.setattr(model_card, "europarl", lambda data: short)
    call = ["model_card", "--data", str(data), "--model", str(folder)]
    twin = ["--float32", str(tmp_path / "float32"), "--softmax", str(tmp_path / "float32")]
    other = ["--other", "mine", *(str(data / f"test.{side}.txt") for side in ("source", "target"))]
    keep = ["--keep", str(tmp_path / "kept")]
    monkeypatch.setattr("sys.argv", [*call, *twin, *other, *keep, "--out", str(out)])
    model_card.main()
    written = json.loads(out.read_text())
    names = [system["name"] for system in written["sets"][0]["systems"]]
    assert names == ["shipped int8", "float32", "softmax float32"]
    assert len(list((tmp_path / "kept").iterdir())) == 10
    assert [test["documents"] for test in written["sets"]] == [2, 2, 2, 2, 2, None]
    assert {row["label"] for row in written["sets"][0]["comparisons"]} >= {"BLEU", "d-BLEU"}
    monkeypatch.setattr(model_card, "RESULTS", out)
    monkeypatch.setattr("sys.argv", [*call, "--check"])
    model_card.main()


def test_every_difference_is_named() -> None:
    system = {"name": "shipped int8", "BLEU": 26.123456789}
    test = {"name": "test", "files": {"test.source.txt": "1"}, "sentences": 2, "documents": 1}
    committed: dict[str, Any] = {"sets": [{**test, "signatures": {}, "systems": [system]}]}
    assert list(model_card.differences(committed, committed)) == []
    measured = copy.deepcopy(committed)
    measured["sets"][0]["systems"][0]["BLEU"] += 1e-9
    measured["sets"][0]["files"]["test.source.txt"] = "2"
    messages = list(model_card.differences(measured, committed))
    assert (
        len(messages) == 2
        and "text files" in messages[0]
        and "BLEU 26.12345679, committed" in messages[1]
    )


@pytest.mark.slow
def test_zeros_and_agreement_of_a_tiny_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another build of the library would take long.
    monkeypatch.setattr(
        shipped_decoding, "library_without_skipping", lambda folder: contextlib.nullcontext()
    )
    out = tmp_path / "decoding.json"
    options = ["--documents", "3", "--agree", "2", "--turns", "1", "--out", str(out)]
    shipped_decoding.main(["--model", str(folder), *options])
    result = json.loads(out.read_text())
    assert [row["same"] for row in result["agreement"]] == [2, 2]
    assert {row["precision"] for row in result["speed"]} == {"int8", "float32"}
    assert 0 < result["zeros"]["attention"]["cross"] < 1
    assert len(result["zeros"]["slots"]) == 4


def agreement(folder: Path, data: Path, *options: str) -> dict[str, Any]:
    """Result of the comparison of both decoders."""
    out = data / "agreement.json"
    native_agreement.main(
        ["--data", str(data), "--model", str(folder), *options, "--out", str(out)]
    )
    result: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return result


@pytest.mark.slow
def test_native_decoding_is_compared_with_torch_in_several_calls(
    folder: Path, tmp_path: Path
) -> None:
    data = prepared(tmp_path / "data")
    first = agreement(folder, data, "--documents", "1")
    assert [row["document"] for row in first["rows"]] == [0]
    assert agreement(folder, data, "--seconds", "-1") == first
    result = agreement(folder, data)
    assert result["rows"][0] == first["rows"][0]
    (total,) = result["summary"]
    assert (total["documents"], total["same_documents"], total["sentences"]) == (2, 2, 3)
    assert total["texts"] == total["same_texts"] > 0
    assert total["largest_score_gap"] < 1e-4
    (data / "test.source.txt").write_text("<d>\nOther.\n", "utf-8")
    with pytest.raises(SystemExit):
        agreement(folder, data)


@pytest.mark.slow
def test_a_difference_between_decoders_is_judged_in_float64(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shortened(model: ReLUFormer, *arguments: Any, **options: Any) -> list[Hypothesis]:
        results = search(model, *arguments, **options)
        if model.target_embedding.weight.element_size() == 8:
            return results
        return [result._replace(tokens=result.tokens[:-1]) for result in results]

    monkeypatch.setattr(native_agreement, "search", shortened)
    result = agreement(folder, prepared(tmp_path / "data"))
    assert result["summary"][0]["same_texts"] == result["summary"][0]["same_documents"] == 0
    for difference in (each for row in result["rows"] for each in row["differences"]):
        longer, shorter = difference["tokens"]
        assert (shorter, difference["first_difference"]) == (longer - 1, longer - 1)
        # Greedy search takes the most likely token.
        assert difference["token_gap"] > 0
        assert difference["float64_search"] == "native"


@pytest.mark.slow
def test_length_penalties_are_compared_with_that_of_the_recipe(
    folder: Path, tmp_path: Path
) -> None:
    data, out = prepared(tmp_path / "data"), tmp_path / "penalty.json"
    options = ["--penalties", "0.5", "1", "--every", "2", "--out", str(out)]
    length_penalty.main(["--data", str(data), "--model", str(folder), *options])
    result = json.loads(out.read_text("utf-8"))
    assert [system["length_penalty"] for system in result["systems"]] == [1.0, 0.5]
    assert (result["documents"], result["sentences"]) == (1, 2)
    assert {row["system"] for row in result["comparisons"]} == {"length penalty 0.5"}


def test_shuffled_sentences_are_put_back() -> None:
    documents = [["a", "b"], [], ["c"], ["d", "e", "f"]]
    mixed, order = shipped_context.shuffled(documents)
    assert [len(document) for document in mixed] == [2, 0, 1, 3]
    assert mixed != documents
    assert shipped_context.restored(mixed, order) == documents


@pytest.mark.slow
def test_contexts_are_compared(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = prepared(tmp_path / "data"), tmp_path / "context.json"
    # The texts are not encoded for training.
    monkeypatch.setattr(shipped_context, "reading", lambda options, length: {"tokens": length})
    sizes = ["--contexts", "16", "32", "--lengths", "16", "32"]
    call = ["--data", str(data), "--model", str(folder), *sizes, "--out", str(out)]
    shipped_context.main([*call, "--keep", str(tmp_path / "kept")])
    result = json.loads(out.read_text("utf-8"))
    context = result["context"]
    assert [row["tokens"] for row in result["reading"]] == [16, 32]
    names = [system["name"] for system in context["systems"]]
    assert names == ["single sentences", "up to 16 tokens", "up to 32 tokens"]
    pairs = context["against_shuffled"]
    assert [[system["name"] for system in pair["systems"]] for pair in pairs] == [
        [f"up to {length} tokens, shuffled", f"up to {length} tokens"] for length in (16, 32)
    ]
    assert [cost["context"] for cost in result["extrapolation"]["costs"]] == names[1:]
    assert len(list((tmp_path / "kept").iterdir())) == 7
