"""Measurements on trained document models: longer inputs than trained on, and use of context."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reluformer.checkpoint import LoadedRun, load_run
from reluformer.data.text import DOCUMENT, lines
from reluformer.data.tokenizer import SEP
from reluformer.diagnostics import attention_maps
from reluformer.files import write_text
from reluformer.inspection.texts import dev_batch
from reluformer.model.losses import translation_loss
from reluformer.ops.stats import has_weight
from reluformer.study.budgets import Decoding
from reluformer.study.cells import load_outcome
from reluformer.study.counts import save_counts
from reluformer.study.finishing import large_batch, score, test_files, translate_text
from reluformer.train.data import load_data
from reluformer.train.initialise import autocast
from reluformer.train.objective import inputs
from reluformer.translation.translator import Translator

_DISTANCE_EXAMPLES = 4
_NLL_BATCHES = 50


class Probe(NamedTuple):
    """A trained model and where to measure it."""

    run: Path
    corpus: Path
    folder: Path
    """Folder of the probe's own files."""
    tests: Sequence[str]
    decoding: Decoding


def extrapolate(probe: Probe, length: int) -> tuple[dict[str, float], dict[str, Any]]:
    """d-BLEU and dev loss with inputs of up to `length` tokens, at any training length."""
    probe.folder.mkdir(parents=True, exist_ok=True)
    translator = _translator(probe, max_length=length)
    test = probe.tests[-1]
    source, reference = test_files(probe.corpus, test, probe.decoding, probe.folder)
    output = probe.folder / f"{test}.hypothesis"
    _write(output, translate_documents(probe, translator, test, list(lines(source))))
    metrics, counts = score(reference, output, documents=True)
    save_counts(probe.folder, test, counts)
    values = {"dbleu": metrics["d-BLEU"]["value"], "bleu": metrics["BLEU"]["value"]}
    values["dev_nll"] = nll_at_length(_model(probe), length)
    return values, {"scores": {test: metrics}, "hypotheses": {test: output.name}}


def use_of_context(probe: Probe) -> tuple[dict[str, float], dict[str, Any]]:
    """BLEU with the document, without it and with a shuffled one; where attention reads."""
    probe.folder.mkdir(parents=True, exist_ok=True)
    translator = _translator(probe)
    test = probe.tests[0]
    source, reference = test_files(probe.corpus, test, probe.decoding, probe.folder)
    texts = list(lines(source))
    outputs = {
        "document": translate_documents(probe, translator, test, texts),
        "sentence": translate_text(translator, texts, documents=False),
        "shuffled": _shuffled(translator, texts),
    }
    values, scores = {}, {}
    for name, translated in outputs.items():
        path = probe.folder / f"{test}.{name}.hypothesis"
        _write(path, translated)
        scores[name], _ = score(reference, path, documents=True)
        values[f"bleu_{name}"] = scores[name]["BLEU"]["value"]
    values |= reading_distances(_model(probe))
    return values, {"context_scores": scores}


def translate_documents(
    probe: Probe, translator: Translator, test: str, texts: list[str]
) -> list[str]:
    """Translations of a test set with each sentence's document in view.

    Long documents take minutes. The probed model's own cell kept its translation, which is the same
    at the trained length.
    """
    outcome = load_outcome(probe.run)
    name = None if outcome is None else outcome.detail.get("hypotheses", {}).get(test)
    if name is not None and translator.max_length == translator.trained_length:
        kept = probe.run / name
        if kept.is_file():
            return list(lines(kept))
    return translate_text(translator, texts, documents=True)


def _shuffled(translator: Translator, texts: list[str]) -> list[str]:
    """Translations of sentences among random other sentences, in the original order."""
    places = [at for at, text in enumerate(texts) if text.strip() not in ("", DOCUMENT)]
    mixed, order = shuffle_sentences([texts[at] for at in places])
    translated = translator.lines(_with(texts, places, mixed), together=True)
    return _with(texts, places, restore_order([translated[at] for at in places], order))


def shuffle_sentences(sentences: Sequence[str]) -> tuple[list[str], list[int]]:
    """Sentences in a random order, which is always the same, and that order."""
    order = list(range(len(sentences)))
    Random(0).shuffle(order)
    return [sentences[at] for at in order], order


def restore_order(sentences: Sequence[str], order: Sequence[int]) -> list[str]:
    """Undo `shuffle_sentences`."""
    result = [""] * len(order)
    for at, sentence in zip(order, sentences, strict=True):
        result[at] = sentence
    return result


def _with(texts: Sequence[str], places: Sequence[int], sentences: Sequence[str]) -> list[str]:
    """Texts with other sentences in some places."""
    result = list(texts)
    for place, sentence in zip(places, sentences, strict=True):
        result[place] = sentence
    return result


def reading_distances(run: LoadedRun) -> dict[str, float]:
    """Mean distance, in tokens, between query and key, and share of weight on other sentences."""
    device = _device()
    batch = {name: t.to(device) for name, t in dev_batch(run, _DISTANCE_EXAMPLES).items()}
    maps = attention_maps(run.model.to(device), batch)
    marks = {side: (batch[side] == SEP).cumsum(dim=1) for side in ("source", "target")}
    values: dict[str, float] = {}
    for site in ("encoder", "decoder", "cross"):
        weights = torch.stack([w for (s, _), w in maps.items() if s == site]).abs()
        rows = "source" if site == "encoder" else "target"
        columns = "target" if site == "decoder" else "source"
        real = _real(batch, rows)  # [B, Tq]
        sums = weights.sum(dim=-1)  # [layers, B, H, Tq]
        # A row without weight reads at no distance, not at 0.
        read = real[None, :, None] & has_weight(sums)
        shares = weights / sums.unsqueeze(-1).clamp_min(1e-12)
        other = marks[rows].unsqueeze(-1) != marks[columns].unsqueeze(1)  # [B, Tq, Tk]
        outside = (shares * other[None, :, None]).sum(dim=-1)
        values[f"outside_{site}"] = float(outside[read].mean())
        if site != "cross":
            positions = torch.arange(weights.shape[-1], device=weights.device)
            distance = (positions[:, None] - positions).abs()[: weights.shape[-2]]
            values[f"distance_{site}"] = float((shares * distance).sum(dim=-1)[read].mean())
    return values


@torch.no_grad()
def nll_at_length(run: LoadedRun, length: int) -> float:
    """Dev loss per token on examples that are filled up to `length` tokens."""
    config = run.recipe.data
    data = replace(config, max_length=length, cross_documents=config.unit == "document")
    tokens = max(run.recipe.train.batch_tokens, 8 * -(-length // 8))
    recipe = replace(run.recipe, data=data, train=replace(run.recipe.train, batch_tokens=tokens))
    split = load_data(recipe).dev
    assert split is not None
    device = _device()
    model, precision = run.model.to(device), autocast(recipe.train, device)
    total, count = 0.0, 0
    for batch, _ in zip(split.batches(recipe).epoch(0), range(_NLL_BATCHES), strict=False):
        here = batch.to(device)
        # As in training, whose dev loss this one stands beside.
        with precision():
            logits = model(**inputs(here)).logits
        total += float(translation_loss(logits, here.target_out, pad_id=model.config.pad_id)[1])
        count += batch.target_tokens
    return total / count


def _model(probe: Probe) -> LoadedRun:
    """The probed model with the probe's corpus, which may have moved since the training."""
    run = load_run(probe.run)
    data = replace(run.recipe.data, source=str(probe.corpus))
    return run._replace(recipe=replace(run.recipe, data=data))


def _translator(probe: Probe, max_length: int | None = None) -> Translator:
    """The probed model with the beam and the length penalty its own cell was finished with."""
    outcome = load_outcome(probe.run)
    tuned = {} if outcome is None else outcome.detail.get("tuned", {})
    return Translator.load(
        probe.run,
        beam=probe.decoding.beam,
        length_penalty=tuned.get("length_penalty", 1.0),
        max_length=max_length,
        batch_tokens=large_batch(),
    )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _real(batch: dict[str, Tensor], side: str) -> Tensor:
    tokens = batch[side]
    return torch.arange(tokens.shape[1], device=tokens.device) < batch[f"{side}_lengths"].unsqueeze(
        -1
    )


def _write(path: Path, texts: Sequence[str]) -> None:
    write_text(path, "".join(f"{text}\n" for text in texts))
