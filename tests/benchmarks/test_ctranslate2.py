"""The benchmark against CTranslate2 still runs; its numbers are not looked at."""

from pathlib import Path

import pytest

from benchmarks import ctranslate2 as benchmark
from benchmarks.ctranslate2_model import convert
from benchmarks.translate_cpu import Shape, sources_of
from reluformer.errors import UserError
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
