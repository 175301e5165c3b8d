"""The translation benchmark still runs; its numbers are not looked at."""

import pytest
import torch

from benchmarks.translate_cpu import Shape, check, main, our_model, our_run, sources_of

SHAPE = Shape(vocabulary=50, width=16, heads=2, layers=1, slots=16)


def test_our_half_translates_to_the_forced_lengths() -> None:
    sources = sources_of([9, 4, 6], SHAPE.vocabulary)
    model = our_model(SHAPE, "relu")
    check(model, sources)
    assert [len(found.tokens) for found in our_run(model, sources)] == [9, 4, 6]


def test_wrong_scores_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = our_model(SHAPE, "relu")
    decode = model.decode
    monkeypatch.setattr(model, "decode", lambda *arguments: 1.5 * decode(*arguments))
    with pytest.raises(AssertionError, match="off by"), torch.inference_mode():
        check(model, sources_of([9, 4], SHAPE.vocabulary))


def test_both_halves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("sys.argv", ["translate_cpu", "--quick"])
    main()
    assert "Marian" in capsys.readouterr().out
