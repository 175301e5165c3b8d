"""Translate a test set with the length penalty that has the best BLEU on a part of the dev set.

    python -m benchmarks.tuned --model runs/sentence --dev data/europarl-sent/dev \\
        --test data/europarl-sent/test --output test.hypothesis

Reads PREFIX.source.txt and PREFIX.target.txt; the beam is 5. Prints BLEU for each penalty and the
chosen penalty as JSON. Tuning every model of a comparison removes differences that come only from
the length of translations. The part consists of every n-th sentence of the dev set, or, with
`--documents`, of its beginning, because sentences need the context of their document.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

from reluformer.console import guarded
from reluformer.data.text import DOCUMENT, lines
from reluformer.errors import UserError
from reluformer.files import write_text
from reluformer.translation.translator import Translator

PENALTIES = (0.8, 1.0, 1.2, 1.4, 1.6)


def part(prefix: str, most: int, *, documents: bool) -> tuple[list[str], list[str]]:
    """Sources and references of a part of a set."""
    sources, references = (list(lines(f"{prefix}.{side}.txt")) for side in ("source", "target"))
    if documents:
        return sources[:most], references[:most]
    every = max(1, len(sources) // most)
    return sources[::every], references[::every]


def bleu(hypotheses: list[str], references: list[str]) -> float:
    """BLEU over sentences, without document markers."""
    from sacrebleu.metrics.bleu import BLEU

    pairs = [
        (hypothesis, reference)
        for hypothesis, reference in zip(hypotheses, references, strict=True)
        if reference.strip() not in ("", DOCUMENT)
    ]
    kept, expected = zip(*pairs, strict=True)
    return float(BLEU().corpus_score(list(kept), [list(expected)]).score)


@guarded
def main() -> None:
    """Tune, translate and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a run's folder")
    parser.add_argument("--dev", required=True, help="prefix of the set to tune on")
    parser.add_argument("--test", nargs="+", required=True, help="prefixes of sets to translate")
    parser.add_argument("--output", type=Path, nargs="+", required=True, help="a file for each")
    parser.add_argument("--sentences", type=int, default=600, help="number of dev sentences")
    parser.add_argument("--documents", action="store_true")
    parser.add_argument("--batch-tokens", type=int)
    arguments = parser.parse_args()
    if len(arguments.test) != len(arguments.output):
        raise UserError(
            f"--output must name a file for each of {len(arguments.test)} test sets, got "
            f"{len(arguments.output)}"
        )
    translate = Translator.load(arguments.model, beam=5, batch_tokens=arguments.batch_tokens)
    sources, references = part(arguments.dev, arguments.sentences, documents=arguments.documents)
    scores, start = {}, time.perf_counter()
    for penalty in PENALTIES:
        translate.config = dataclasses.replace(translate.config, length_penalty=penalty)
        scores[penalty] = bleu(translate.lines(sources, together=arguments.documents), references)
    best = max(scores, key=lambda penalty: scores[penalty])
    translate.config = dataclasses.replace(translate.config, length_penalty=best)
    tuned = time.perf_counter()
    for prefix, output in zip(arguments.test, arguments.output, strict=True):
        texts = list(lines(f"{prefix}.source.txt"))
        translated = translate.lines(texts, together=arguments.documents)
        write_text(output, "".join(f"{line}\n" for line in translated))
    report = {
        "length penalty": best,
        "BLEU on dev by penalty": {penalty: round(score, 2) for penalty, score in scores.items()},
        "seconds to tune": round(tuned - start, 1),
        "seconds to translate": round(time.perf_counter() - tuned, 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
