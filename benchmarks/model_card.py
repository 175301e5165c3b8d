"""Scores of the shipped model, as they are printed in its model card.

    reluformer prepare DATA --corpus europarl-doc --root CORPORA --tokenizer shipped
    python -m benchmarks.model_card --data DATA --check      # compares with the committed results
    python -m benchmarks.model_card --data DATA --out FILE --float32 RUN --softmax RUN \\
        --other tatoeba test.en.xz test.de.xz

The native decoder translates the published test documents (`test`) and whole debates
(`test.long`) with the recommended search, sentences of a document together, and `test` once more
sentence by sentence. `--float32` and `--softmax` add the model before quantisation and the softmax
twin on `test`, which are not shipped, and compare them with the shipped model by paired bootstrap.
`--other` adds sentences from elsewhere, which are translated one by one.

`--check` exits with 1 unless every score of the shipped model equals the committed one to the last
digit. Sums of int8 products are exact, but norms and attention weights round differently with
vectors of another width: another processor may differ in the second decimal.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reluformer.checkpoint import read_run
from reluformer.console import guarded
from reluformer.errors import UserError
from reluformer.evaluation.aligned_files import Documents, read_aligned
from reluformer.evaluation.results import Evaluation
from reluformer.evaluation.scores import evaluate
from reluformer.files import sha256, write_json
from reluformer.info import commit, info
from reluformer.shipped import shipped_model
from reluformer.translation.translator import Translator

RESULTS = Path(__file__).parents[1] / "results" / "2026-11-16-shipped-model.json"
SHIPPED = "shipped int8"
METRICS = ("BLEU", "chrF2")


class TestSet(NamedTuple):
    """Text files, and how they are translated."""

    name: str
    source: Path
    target: Path
    has_documents: bool = True
    is_together: bool = True
    """Whether the sentences of a document are translated together."""
    max_length: int | None = None
    """Most tokens that are translated together; None is the model's default."""
    is_compared: bool = False
    """Whether float32 and the softmax twin are translated and scored, too."""


def europarl(data: Path) -> list[TestSet]:
    """Test sets of the prepared corpus."""
    test, long = (
        [data / f"{split}.{side}.txt" for side in ("source", "target")]
        for split in ("test", "test.long")
    )
    return [
        TestSet("test", *test, max_length=512, is_compared=True),
        TestSet("test, up to 128 tokens", *test, max_length=128, is_compared=True),
        TestSet("test, single sentences", *test, is_together=False),
        TestSet("whole debates", *long, max_length=512),
        TestSet("whole debates, up to 128 tokens", *long, max_length=128),
    ]


class SystemSpec(NamedTuple):
    """A model and the precision that it is translated with."""

    name: str
    folder: Path
    precision: Any
    penalty: float | None = None
    """Length penalty; None is that of the recipe."""


def translate(
    system: SystemSpec, test: TestSet, sources: Documents
) -> tuple[Documents, dict[str, Any]]:
    """Translations by document, and their cost."""
    settings = {"max_length": test.max_length, "length_penalty": system.penalty}
    translator = Translator.load(
        system.folder,
        device="cpu",
        decoder="native",
        precision=system.precision,
        **{name: value for name, value in settings.items() if value is not None},
    )
    lines = [line for document in sources for line in (*document, "")]
    began = time.perf_counter(), time.process_time()
    rest = iter(translator.lines(lines, together=test.is_together))
    seconds, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    translations = [[next(rest) for _ in (*document, "")][:-1] for document in sources]
    encode = translator.tokenizer.encode_batch
    tokens = sum(len(ids) for document in translations for ids in encode(document))
    return translations, {
        "name": system.name,
        "length_penalty": translator.config.length_penalty,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "skipped": vars(translator.engine.native.skipped),  # type: ignore[attr-defined]
    }


def translate_once(
    system: SystemSpec, test: TestSet, sources: Documents, kept: Path | None
) -> tuple[Documents, dict[str, Any]]:
    """As `translate`, with results kept in a folder for the next call."""
    file = None if kept is None else kept / f"{system.name}, {test.name}.json"
    if file is not None and file.is_file():
        stored = json.loads(file.read_text("utf-8"))
        return stored["translations"], stored["cost"]
    translations, cost = translate(system, test, sources)
    print(f"{test.name}: {system.name} took {cost['seconds']} s", file=sys.stderr, flush=True)
    if file is not None:
        write_json(file, {"translations": translations, "cost": cost})
    return translations, cost


def score(test: TestSet, systems: list[SystemSpec], kept: Path | None) -> dict[str, Any]:
    """Translate one test set with all systems and score them."""
    sources, (references,) = read_aligned(test.source, [test.target], documents=test.has_documents)
    hypotheses, costs = {}, []
    for system in systems:
        hypotheses[system.name], cost = translate_once(system, test, sources, kept)
        costs.append(cost)
    result = evaluate(references, hypotheses, documents=test.has_documents, metrics=METRICS)
    return {
        "name": test.name,
        "files": {file.name: sha256(file) for file in (test.source, test.target)},
        **scores_of(result),
        "costs": costs,
    }


def scores_of(result: Evaluation) -> dict[str, Any]:
    """Scores by system and label, comparisons with the shipped model, and signatures."""
    mixed = {
        system.name: [each for each in system.scores if each.case == "mixed"]
        for system in result.systems
    }
    labels = {each.label: each.signature for each in next(iter(mixed.values()))}
    return {
        "sentences": result.sentences,
        "documents": result.documents,
        "systems": [
            {"name": name, **{each.label: each.value for each in scores}}
            for name, scores in mixed.items()
        ],
        "comparisons": [
            {"label": comparison.label, **comparison._asdict()} for comparison in result.comparisons
        ],
        "signatures": labels,
    }


def differences(measured: dict[str, Any], committed: dict[str, Any]) -> Iterator[str]:
    """Sentences about scores of the shipped model that differ from the committed ones."""
    expected = {test["name"]: test for test in committed["sets"]}
    for test in measured["sets"]:
        before = expected[test["name"]]
        if test["files"] != before["files"]:
            yield f"{test['name']}: the text files are not the committed ones"
        for key in ("sentences", "documents", "signatures"):
            if test[key] != before[key]:
                yield f"{test['name']}: {key} {test[key]}, committed {before[key]}"
        now, then = (
            next(system for system in one["systems"] if system["name"] == SHIPPED)
            for one in (test, before)
        )
        for label in then:
            if now[label] != then[label]:
                yield f"{test['name']}: {label} {now[label]}, committed {then[label]}"


def measure(
    tests: list[TestSet], systems: list[SystemSpec], kept: Path | None = None
) -> dict[str, Any]:
    """All scores with the description of the model and the machine."""
    stored = read_run(systems[0].folder)
    sets = []
    for test in tests:
        sets.append(score(test, systems if test.is_compared else systems[:1], kept))
        _show(sets[-1])
    return {
        "format": "reluformer model card 1",
        "commit": commit(),
        "info": info(),
        "model": {
            "files": {
                file.name: sha256(file) for file in sorted(systems[0].folder.glob("*.safetensors"))
            },
            "parameters": sum(t.numel() for t in stored.model.skeleton.parameters()),
            "search": vars(stored.recipe.decode),
        },
        "sets": sets,
    }


def _show(test: dict[str, Any]) -> None:
    for system in test["systems"]:
        values = "  ".join(f"{key} {system[key]:.2f}" for key in test["signatures"])
        print(f"{test['name']:24} {system['name']:16} {values}", flush=True)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Parser of a script that runs the shipped model, or another, on prepared data."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of `reluformer prepare`")
    parser.add_argument("--model", type=Path, help="default: the shipped model")
    return parser


def add_sampling(parser: argparse.ArgumentParser, every: int) -> None:
    """Add the options of scripts that translate some documents; `every` is the default."""
    parser.add_argument("--every", type=int, default=every, help="use every n-th document")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder that keeps translations between calls")
    parser.add_argument("--out", type=Path, help="JSON file to write")


@guarded
def main() -> None:
    """Measure, and write or compare the scores."""
    parser = parser_of(__doc__)
    parser.add_argument("--float32", type=Path, help="run before quantisation")
    parser.add_argument("--softmax", type=Path, help="run of the softmax twin")
    parser.add_argument("--softmax-penalty", type=float, help="length penalty of the twin")
    parser.add_argument("--keep", type=Path, help="folder that keeps translations between calls")
    parser.add_argument(
        "--other", nargs=3, action="append", default=[], metavar=("NAME", "SOURCE", "TARGET")
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--check", action="store_true", help=f"compare with results/{RESULTS.name}")
    arguments = parser.parse_args()
    systems = [SystemSpec(SHIPPED, arguments.model or shipped_model(), None)]
    if arguments.float32:
        systems.append(SystemSpec("float32", arguments.float32, "float32"))
    if arguments.softmax:
        twin = arguments.softmax, "float32", arguments.softmax_penalty
        systems.append(SystemSpec("softmax float32", *twin))
    others = [
        TestSet(name, Path(source), Path(target), has_documents=False, is_together=False)
        for name, source, target in arguments.other
    ]
    measured = measure([*europarl(arguments.data), *others], systems, arguments.keep)
    if arguments.out:
        write_json(arguments.out, measured)
    if arguments.check:
        problems = list(differences(measured, json.loads(RESULTS.read_text("utf-8"))))
        if problems:
            raise UserError("; ".join(problems))
        print("All scores equal the committed ones to the last digit.")


if __name__ == "__main__":
    main()
