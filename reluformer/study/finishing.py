"""From a finished model to scores: length penalty tuned on dev, test sets translated, BLEU.

Every model of a comparison is finished alike: a model that ends its sentences early is not a worse
translator for it, as long as all are tuned the same way. What is done is kept in `finishing.json`,
because the clock may cut a cell here, and long documents take minutes.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reluformer.checkpoint import MODEL
from reluformer.data.text import DOCUMENT, lines
from reluformer.evaluation.aligned_files import read_aligned
from reluformer.evaluation.cached_metric import CachedMetric, Metric
from reluformer.evaluation.results import Level
from reluformer.evaluation.scores import scores_by_length
from reluformer.files import sha256, write_json, write_text
from reluformer.model.pretrained import WEIGHTS
from reluformer.reading import read_json_object
from reluformer.study.budgets import Decoding
from reluformer.study.counts import Counts, save_counts
from reluformer.study.ranked_search import RankedSearch
from reluformer.translation.engine import TorchEngine
from reluformer.translation.translator import Translator

# Decoding waits for the host: a large GPU takes few large batches.
_LARGE_BATCH = 131_072
_LARGE_MEMORY = 40 * 2**30


def finish_cell(
    run: Path, corpus: Path, tests: Sequence[str], decoding: Decoding, *, documents: bool
) -> dict[str, Any]:
    """Tune, translate and score one run.

    Args:
        run: Folder of the run; hypotheses are written into it.
        corpus: Prepared folder with `dev` and the test sets as text.
        tests: Names of the test sets, such as `test` and `test.long`.
        decoding: Beam, penalties and numbers of lines.
        documents: Keep the sentences of a document in view of each other.

    Returns:
        `tuned` (penalty and dev BLEU by penalty), `scores` by test set, `hypotheses` (file names).
    """
    translator = Translator.load(run, beam=decoding.beam, batch_tokens=large_batch())
    done = _Progress.load(run, decoding)
    if not done.tuned:
        start = time.perf_counter()
        sources, references = part_of(corpus / "dev", decoding.dev_lines, contiguous=documents)
        tuned = tune_penalty(translator, sources, references, decoding, documents=documents)
        tuned["seconds"] = round(time.perf_counter() - start, 1)
        done.keep(tuned=tuned)
    penalty = done.tuned["length_penalty"]
    translator.config = dataclasses.replace(translator.config, length_penalty=penalty)
    hypotheses = {test: f"{test}.hypothesis" for test in tests}
    for test in tests:
        if test in done.scores:
            continue
        files = test_files(corpus, test, decoding, run)
        output = run / hypotheses[test]
        start = time.perf_counter()
        translated = translate_text(translator, list(lines(files[0])), documents=documents)
        write_text(output, "".join(f"{line}\n" for line in translated))
        scores, counts = score(files[1], output, documents=documents)
        save_counts(run, test, counts)
        scores["seconds"] = round(time.perf_counter() - start, 1)
        done.keep(scores={**done.scores, test: scores})
    return {"tuned": done.tuned, "scores": done.scores, "hypotheses": hypotheses}


class _Progress:
    """Results so far of one model and one way of decoding, also of an earlier start."""

    def __init__(self, path: Path, key: str, values: dict[str, Any]) -> None:
        self._path, self._key = path, key
        self.tuned: dict[str, Any] = values.get("tuned", {})
        self.scores: dict[str, Any] = values.get("scores", {})

    @classmethod
    def load(cls, run: Path, decoding: Decoding) -> "_Progress":
        """Progress of a run; none if it is of another model or another way of decoding."""
        path = run / "finishing.json"
        key = f"{sha256(run / MODEL / WEIGHTS)} {json.dumps(dataclasses.asdict(decoding))}"
        values = read_json_object(path) if path.is_file() else {}
        return cls(path, key, values if values.get("key") == key else {})

    def keep(self, **values: dict[str, Any]) -> None:
        """Set `tuned` or `scores` and write the file."""
        self.tuned = values.get("tuned", self.tuned)
        self.scores = values.get("scores", self.scores)
        write_json(self._path, {"key": self._key, "tuned": self.tuned, "scores": self.scores})


def tune_penalty(
    translator: Translator,
    sources: list[str],
    references: list[str],
    decoding: Decoding,
    *,
    documents: bool,
) -> dict[str, Any]:
    """The length penalty with the highest BLEU on a part of dev."""
    dev_bleu: dict[float, float] = {}
    engine, config = translator.engine, translator.config
    if isinstance(engine, TorchEngine) and config.beam > 1:
        translator.engine = RankedSearch(engine)
    for penalty in decoding.penalties:
        translator.config = dataclasses.replace(config, length_penalty=penalty)
        dev_bleu[penalty] = bleu(
            translate_text(translator, sources, documents=documents), references
        )
    translator.engine, translator.config = engine, config
    best = max(dev_bleu, key=lambda penalty: dev_bleu[penalty])
    return {
        "length_penalty": best,
        "dev_bleu": {str(penalty): round(value, 2) for penalty, value in dev_bleu.items()},
    }


def translate_text(translator: Translator, texts: list[str], *, documents: bool) -> list[str]:
    """Translate lines with their documents in view, or one by one; document marks are kept."""
    if documents:
        return translator.lines(texts, together=True)
    places = [at for at, text in enumerate(texts) if text.strip() not in ("", DOCUMENT)]
    result = list(texts)
    translated = translator.lines([texts[at] for at in places])
    for place, text in zip(places, translated, strict=True):
        result[place] = text
    return result


def part_of(prefix: Path, most: int, *, contiguous: bool) -> tuple[list[str], list[str]]:
    """About `most` source lines of a set and their references.

    Every n-th line is taken, so that the part is like the whole; a contiguous part is the
    beginning, whose sentences keep their documents.
    """
    sources, references = (list(lines(f"{prefix}.{side}.txt")) for side in ("source", "target"))
    if contiguous:
        return sources[:most], references[:most]
    every = max(1, len(sources) // most)
    return sources[::every], references[::every]


def test_files(corpus: Path, test: str, decoding: Decoding, folder: Path) -> tuple[Path, Path]:
    """Source and reference of a test set, cut to the budget's number of lines in `folder`."""
    files = (corpus / f"{test}.source.txt", corpus / f"{test}.target.txt")
    if decoding.test_lines is None:
        return files
    cut = (folder / f"{test}.source.txt", folder / f"{test}.target.txt")
    for whole, part in zip(files, cut, strict=True):
        kept = list(lines(whole))[: decoding.test_lines]
        write_text(part, "".join(f"{line}\n" for line in kept))
    return cut


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU by sentence; document marks do not count."""
    pairs = [
        (hypothesis, reference)
        for hypothesis, reference in zip(hypotheses, references, strict=True)
        if reference.strip() not in ("", DOCUMENT)
    ]
    segments, right = ([pair[side] for pair in pairs] for side in (0, 1))
    return CachedMetric("BLEU", right, [segments], "13a").score(segments)


def score(
    reference: Path, hypothesis: Path, *, documents: bool
) -> tuple[dict[str, Any], dict[Level, Counts]]:
    """BLEU and chrF2 with signatures, and the BLEU counts, by sentence and on request by document.

    Scores of whole documents have names that begin with `d-`; d-BLEU is also by document length.
    """
    levels: tuple[Level, ...] = ("sentence", "document") if documents else ("sentence",)
    metrics: tuple[Metric, ...] = ("BLEU", "chrF2")
    scores: dict[str, Any] = {}
    counts: dict[Level, Counts] = {}
    for level in levels:
        right, (system,) = read_aligned(reference, [hypothesis], documents=level == "document")
        expected, segments = ([" ".join(group) for group in texts] for texts in (right, system))
        for name in metrics:
            metric = CachedMetric(name, expected, [segments], "13a")
            value: dict[str, Any] = {"value": round(metric.score(segments), 2)}
            value["signature"] = metric.signature
            if name == "BLEU":
                counts[level] = Counts(np.array(metric.counts(segments)), metric.signature)
                if level == "document":
                    groups = scores_by_length(metric, expected, segments)
                    value["by_length"] = [
                        {**group._asdict(), "value": round(group.value, 2)} for group in groups
                    ]
            scores[f"{'d-' if level == 'document' else ''}{name}"] = value
    return scores, counts


def large_batch() -> int | None:
    """Source tokens of a batch for translation on this machine's GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    memory = torch.cuda.get_device_properties(0).total_memory
    return _LARGE_BATCH if memory >= _LARGE_MEMORY else _LARGE_BATCH // 16
