"""Probes of document models: longer inputs, shuffled context, reading distances."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from reluformer.checkpoint import LoadedRun, load_run
from reluformer.config.recipe import load_recipe
from reluformer.study import probes
from reluformer.study.budgets import Decoding
from reluformer.study.cells import Outcome
from reluformer.study.finishing import bleu, part_of, translate_text
from reluformer.train import train

SMALL = [
    "data.generated.train=40", "data.generated.dev=6", "data.generated.lengths=[2,4]",
    "data.max_length=64", "model.width=16", "model.heads=2", "model.slots=16",
    "model.encoder_layers=1", "model.decoder_layers=1", "train.steps=2", "train.warmup=1",
    "train.log_every=2", "train.dev_every=2", "train.bleu_every=null", "train.batch_tokens=256",
]  # fmt: skip


class Numbering:
    """Stands in for a translator: every line becomes its place in the call and its text."""

    def lines(self, texts: list[str], together: bool = False) -> list[str]:
        return [text if text == "<d>" else f"{at}:{text}" for at, text in enumerate(texts)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    folder = tmp_path_factory.mktemp("run")
    train(load_recipe("tiny", SMALL), folder, quiet=True)
    return load_run(folder)


def test_shuffled_context_returns_sentences_in_order() -> None:
    translator: Any = Numbering()
    texts = ["<d>", "a", "b", "<d>", "c", "d", "e"]
    translated = probes._shuffled(translator, texts)
    assert [line.split(":")[-1] for line in translated] == texts
    assert [line for line in translated if line != "<d>"] != ["1:a", "2:b", "4:c", "5:d", "6:e"]


def test_marks_stay_when_sentences_are_translated_alone() -> None:
    translator: Any = Numbering()
    texts = ["<d>", "a", "", "b"]
    assert translate_text(translator, texts, documents=False) == ["<d>", "0:a", "", "1:b"]


def test_reading_distances_are_shares_and_tokens(run: LoadedRun) -> None:
    values = probes.reading_distances(run)
    for site in ("encoder", "decoder", "cross"):
        assert 0 <= values[f"outside_{site}"] <= 1 + 1e-6
    # Nothing is learnt yet: the encoder reads all sentences, the decoder no later ones.
    assert values["outside_encoder"] > 0.3 and values["distance_decoder"] < 32
    assert 1 < values["distance_encoder"] < 64


def test_rows_that_read_nothing_have_no_distance(
    run: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_head_only(*arguments: Any) -> Any:
        heads = torch.tensor([1.0, 0.0])[:, None, None]
        return {at: weights * heads for at, weights in maps(*arguments).items()}

    maps = probes.attention_maps
    both = probes.reading_distances(run)
    monkeypatch.setattr(probes, "attention_maps", first_head_only)
    # Nothing is learnt yet: both heads read about equally far.
    assert probes.reading_distances(run) == pytest.approx(both, rel=0.2)


def test_a_translation_that_the_model_s_cell_kept_is_not_made_again(tmp_path: Path) -> None:
    translator: Any = Numbering()
    translator.max_length, translator.trained_length = 64, 64
    probe = probes.Probe(tmp_path, tmp_path, tmp_path, ("test",), Decoding())
    translate = partial(probes.translate_documents, probe, translator, "test", ["a"])
    (tmp_path / "test.hypothesis").write_text("kept\n", encoding="utf-8")
    assert translate() == ["0:a"]
    detail = {"hypotheses": {"test": "test.hypothesis"}}
    Outcome(tmp_path.name, {}, "finished", {}, detail).save(tmp_path)
    assert translate() == ["kept"]
    translator.max_length = 128
    assert translate() == ["0:a"]


def test_a_probe_reads_its_own_corpus(run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the training may have moved."""
    data = replace(run.recipe.data, source="old/corpus", generated=None)
    trained = run._replace(recipe=replace(run.recipe, data=data))
    monkeypatch.setattr(probes, "load_run", lambda _: trained)
    probe = probes.Probe(Path("run"), Path("moved/corpus"), Path("probe"), (), Decoding())
    assert probes._model(probe).recipe.data.source == "moved/corpus"


def test_loss_at_other_lengths_covers_all_of_dev(run: LoadedRun) -> None:
    lengths = {length: probes.nll_at_length(run, length) for length in (64, 300)}
    assert all(3 < value < 12 for value in lengths.values())
    assert lengths[64] != lengths[300]


def test_loss_at_other_lengths_has_the_precision_of_training(run: LoadedRun) -> None:
    train = replace(run.recipe.train, precision="bfloat16")
    dtypes = set()
    hook = run.model.register_forward_hook(lambda _, __, out: dtypes.add(out.logits.dtype))
    probes.nll_at_length(run._replace(recipe=replace(run.recipe, train=train)), 64)
    hook.remove()
    assert dtypes == {torch.bfloat16}


def test_a_part_of_dev_is_spread_over_it_or_its_beginning(tmp_path: Path) -> None:
    for side in ("source", "target"):
        text = "".join(f"{side} {number}\n" for number in range(10))
        (tmp_path / f"dev.{side}.txt").write_text(text, encoding="utf-8")
    sources, references = part_of(tmp_path / "dev", 3, contiguous=False)
    assert sources == ["source 0", "source 3", "source 6", "source 9"]
    assert references[1] == "target 3"
    assert part_of(tmp_path / "dev", 2, contiguous=True)[0] == ["source 0", "source 1"]
    assert bleu(["<d>", "a b c d e"], ["<d>", "a b c d e"]) == pytest.approx(100)
