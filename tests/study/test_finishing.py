"""Tuned penalties and scores of a finished model, also after a start that was cut."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reluformer.config.recipe import load_recipe
from reluformer.config.search import SearchConfig
from reluformer.model import ModelConfig, ReLUFormer
from reluformer.study import finishing, ranked_search
from reluformer.study.budgets import Decoding
from reluformer.study.finishing import finish_cell
from reluformer.study.ranked_search import RankedSearch
from reluformer.train import train
from reluformer.translation.engine import TorchEngine

DECODING = Decoding(beam=3, penalties=(0.6, 1.0, 1.6), dev_lines=4)
SOURCES = [[7, 9, 11, 5], [8, 6], [12, 13, 14, 15, 16, 17, 18], [10]]


@pytest.fixture
def engine() -> TorchEngine:
    """A model that is not trained, whose end token is likely enough to be found."""
    torch.manual_seed(2)
    config = ModelConfig(
        vocabulary=24, width=16, heads=2, encoder_layers=1, decoder_layers=1, slots=16
    )
    model = ReLUFormer(config).double()
    torch.nn.init.normal_(model.target_embedding.weight, std=0.3)
    return TorchEngine(model)


def test_one_search_finds_the_best_of_every_penalty(engine: TorchEngine) -> None:
    ranked = RankedSearch(engine)
    lengths = set()
    for penalty in (1.0, 0.0, 0.6, 2.5, -1.0):
        config = SearchConfig(beam=4, length_penalty=penalty)
        found = ranked.search(SOURCES, config, (), ())
        expected = engine.search(SOURCES, config, (), range(4))
        assert [hypothesis.tokens for hypothesis in found] == [h.tokens for h in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.score == pytest.approx(other.score) and one.complete == other.complete
        lengths.add(tuple(len(hypothesis.tokens) for hypothesis in found))
    # The penalty matters.
    assert len(lengths) > 2


def test_texts_are_searched_once_for_each_set_of_banned_ids(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []

    def counted(model: Any, task: Any, *args: Any, **options: Any) -> Any:
        searched.append(len(task.sources))
        return search(model, task, *args, **options)

    search = ranked_search.beam_search
    monkeypatch.setattr(ranked_search, "beam_search", counted)
    ranked = RankedSearch(engine)
    for penalty in (1.0, 1.4):
        config = SearchConfig(beam=2, length_penalty=penalty)
        ranked.search([*SOURCES, SOURCES[0]], config, (), ())
        without = ranked.search(SOURCES[:1], config, (5,), ())
        assert 5 not in without[0].tokens
    assert searched == [4, 1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    settings = [
        "data.generated.train=40", "data.generated.dev=6", "data.max_length=64", "model.width=16",
        "model.heads=2", "model.slots=16", "model.encoder_layers=1", "model.decoder_layers=1",
        "train.steps=2", "train.warmup=1", "train.log_every=2", "train.dev_every=null",
        "train.bleu_every=null", "train.batch_tokens=256",
    ]  # fmt: skip
    train(load_recipe("tiny", settings), folder, quiet=True)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for split in ("dev", "test", "test.long"):
        for side in ("source", "target"):
            text = f"It costs three euros.\nThis is {split}.\n"
            (tmp_path / f"{split}.{side}.txt").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The texts of every translation; the fifth is cut."""
    calls: list[list[str]] = []

    def record(_: Any, texts: list[str], *, documents: bool) -> list[str]:
        calls.append(texts)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return list(texts)

    monkeypatch.setattr(finishing, "translate_text", record)
    yield calls


def test_a_start_after_a_cut_goes_on_with_the_test_set_that_is_left(
    run: Path, corpus: Path, translated: list[list[str]]
) -> None:
    def finish(decoding: Decoding) -> dict[str, Any]:
        return finish_cell(run, corpus, ("test", "test.long"), decoding, documents=False)

    with pytest.raises(KeyboardInterrupt):
        finish(DECODING)
    # Three penalties and two test sets, of which the second is cut.
    assert len(translated) == 5
    result = finish(DECODING)
    assert len(translated) == 6 and "This is test.long." in translated[-1]
    assert list(result["scores"]) == ["test", "test.long"]
    assert result["hypotheses"] == {"test": "test.hypothesis", "test.long": "test.long.hypothesis"}
    assert (run / "test.counts.npz").is_file() and (run / "test.long.counts.npz").is_file()
    assert finish(DECODING) == result and len(translated) == 6
    # Another way of decoding begins anew.
    finish(replace(DECODING, penalties=(1.0,)))
    assert len(translated) == 9
