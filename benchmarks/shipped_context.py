"""What the shipped model does with context, and with more of it than it was trained on.

    reluformer prepare DATA --corpus europarl-doc --root CORPORA --tokenizer shipped
    python -m benchmarks.shipped_context --data DATA --out FILE

Context: the test documents are translated with up to 128 and 512 tokens together, and again with
each sentence among random other sentences of the test set. A model that uses its context loses by
the exchange. Extrapolation: whole debates are translated with up to 2,048 tokens together; in
training there were at most 512. Attention: the share of the weight that lies on other sentences,
on dev. `--keep` keeps translations between calls, and `--every 10` takes a tenth of the documents.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.model_card import (
    METRICS,
    SystemSpec,
    TestSet,
    add_sampling,
    parser_of,
    scores_of,
    translate_once,
)
from reluformer.checkpoint import load_run
from reluformer.console import guarded
from reluformer.evaluation.aligned_files import Documents, read_aligned
from reluformer.evaluation.scores import evaluate
from reluformer.files import sha256, write_json
from reluformer.info import commit, info
from reluformer.shipped import shipped_model
from reluformer.study.probes import reading_distances, restore_order, shuffle_sentences

SINGLE = "single sentences"


class Experiment:
    """Translations of one test set by the shipped model with different contexts."""

    def __init__(self, options: argparse.Namespace, split: str) -> None:
        files = [options.data / f"{split}.{side}.txt" for side in ("source", "target")]
        sources, (references,) = read_aligned(files[0], [files[1]], documents=True)
        self.test = TestSet(split, *files)
        self.sources, self.references = sources[:: options.every], references[:: options.every]
        self.system = SystemSpec("shipped int8", options.model or shipped_model(), None)
        self.keep: Path | None = options.keep
        self.costs: list[dict[str, Any]] = []

    def translate(self, sources: Documents, name: str, max_length: int | None) -> Documents:
        """Translations with up to `max_length` tokens together; None: sentence by sentence."""
        test = self.test._replace(
            name=f"{self.test.name}, {name}",
            is_together=max_length is not None,
            max_length=max_length,
        )
        translations, cost = translate_once(self.system, test, sources, self.keep)
        self.costs.append({"context": name, **cost})
        return translations

    def score(self, hypotheses: dict[str, Documents]) -> dict[str, Any]:
        """Scores, and differences to the first of the translations."""
        result = scores_of(evaluate(self.references, hypotheses, documents=True, metrics=METRICS))
        for system in result["systems"]:
            print(self.test.name, system, flush=True)
        return result

    def description(self) -> dict[str, Any]:
        """Files of the test set and the cost of its translations."""
        files = {file.name: sha256(file) for file in (self.test.source, self.test.target)}
        return {"files": files, "costs": self.costs}


def use_of_context(test: Experiment, lengths: Sequence[int]) -> dict[str, Any]:
    """Scores sentence by sentence, with the document, and with other sentences as context."""
    mixed, order = shuffled(test.sources)
    hypotheses = {SINGLE: test.translate(test.sources, SINGLE, None)}
    pairs = []
    for length in lengths:
        name = f"up to {length} tokens"
        document = test.translate(test.sources, name, length)
        exchanged = test.translate(mixed, f"{name}, shuffled", length)
        hypotheses[name] = document
        systems = {f"{name}, shuffled": restored(exchanged, order), name: document}
        pairs.append({"tokens": length, **test.score(systems)})
    return {**test.score(hypotheses), "against_shuffled": pairs, **test.description()}


def extrapolation(test: Experiment, lengths: Sequence[int]) -> dict[str, Any]:
    """Scores with up to each number of tokens together."""
    hypotheses = {
        f"up to {length} tokens": test.translate(test.sources, f"up to {length} tokens", length)
        for length in lengths
    }
    return {**test.score(hypotheses), **test.description()}


def shuffled(documents: Documents) -> tuple[Documents, list[int]]:
    """Sentences in a random order in documents of the same sizes, and the order."""
    mixed, order = shuffle_sentences(list(chain(*documents)))
    return _in_documents(mixed, documents), order


def restored(documents: Documents, order: list[int]) -> Documents:
    """Undo `shuffled`."""
    return _in_documents(restore_order(list(chain(*documents)), order), documents)


def _in_documents(sentences: list[str], sizes: Documents) -> Documents:
    rest = iter(sentences)
    return [[next(rest) for _ in document] for document in sizes]


def reading(options: argparse.Namespace, length: int) -> dict[str, Any]:
    """Where attention reads in dev documents of up to `length` tokens."""
    run = load_run(options.model or shipped_model())
    data = replace(run.recipe.data, source=str(options.data), max_length=length)
    values = reading_distances(run._replace(recipe=replace(run.recipe, data=data)))
    return {"tokens": length, **{name: round(value, 4) for name, value in values.items()}}


@guarded
def main(arguments: Sequence[str] | None = None) -> None:
    """Translate, score, and write the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    add_sampling(parser, every=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = {
        "format": "reluformer shipped context 1",
        "commit": commit(),
        "info": info(),
        "every": options.every,
        "reading": [reading(options, length) for length in options.contexts],
        "context": use_of_context(Experiment(options, "test"), options.contexts),
        "extrapolation": extrapolation(Experiment(options, "test.long"), options.lengths),
    }
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
