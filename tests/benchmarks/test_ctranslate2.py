"""The benchmark against CTranslate2 still runs; its numbers are not looked at."""

import json
from pathlib import Path

import pytest

from benchmarks import ctranslate2 as benchmark
from benchmarks import ctranslate2_trained
from benchmarks.ctranslate2_model import convert, to_ids, to_text
from benchmarks.translate_cpu import Shape, sources_of
from reluformer.errors import UserError
from tests.serve.tiny import tiny_model
from tests.translation.native.conftest import kernels, native  # noqa: F401

SHAPE = Shape(vocabulary=50, width=16, heads=2, layers=1, slots=16)


def test_our_half_translates_to_the_forced_length() -> None:
    run, model = benchmark.native_run(benchmark.random_model(SHAPE, "relu"), "int8")
    found = run(sources_of([9, 4, 6], SHAPE.vocabulary), 2, 7)
    assert [len(tokens) for tokens in found] == [7, 7, 7]
    # Six projections, keys and values, the vocabulary: at most one byte per weight, and the cache.
    weights = 6 * 16**2 + 2 * 16 * 16 + 50 * 16
    assert weights / 2 < benchmark.step_bytes(SHAPE, "int8", model, 0) <= weights


def test_different_tokens_are_noticed() -> None:
    run, _ = benchmark.native_run(benchmark.random_model(SHAPE, "softmax"), "float32")
    with pytest.raises(AssertionError, match="only 0 of 8"):
        benchmark.check_same(SHAPE, run, lambda sources, beam, length: [[3]] * len(sources))


def test_relu_attention_is_not_converted(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    with pytest.raises(UserError, match="softmax"):
        convert(benchmark.random_model(SHAPE, "relu"), tmp_path, None)


def test_both_halves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ctranslate2")
    arguments = ["ctranslate2", "--quick", "--repeat", "1", "--threads", "1"]
    monkeypatch.setattr("sys.argv", arguments)
    benchmark.main()
    assert "CTranslate2 MB" in capsys.readouterr().out


def test_ids_survive_the_way_through_tokens_of_a_converted_model() -> None:
    assert [to_ids(tokens) for tokens in to_text([[3, 17], [], [499]])] == [[3, 17], [], [499]]


def test_trained_models_translate_the_same_sentences(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    for kind in ("softmax", "relu"):
        tiny_model(tmp_path / kind, kind=kind)
    text = "<d>\nOne here.\nTwo.\n<d>\nThree.\n"
    (tmp_path / "test.source.txt").write_text(text, "utf-8")
    folders = ["--softmax", str(tmp_path / "softmax"), "--model", str(tmp_path / "relu")]
    few = ["--threads", "1", "--batch", "2", "--beam", "1", "--turns", "1"]
    out = tmp_path / "out.json"
    ctranslate2_trained.main([*folders, "--data", str(tmp_path), *few, "--out", str(out)])
    result = json.loads(out.read_text("utf-8"))
    assert [row["same"] for row in result["agreement"]] == [3]
    assert [row["precision"] for row in result["rows"]] == ["int8", "float32"]
