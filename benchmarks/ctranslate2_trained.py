"""Decoding of trained models on a CPU: the shipped model against its softmax twin in CTranslate2.

    pip install ctranslate2
    python -m benchmarks.ctranslate2_trained --softmax RUN --data DATA --out FILE

The softmax twin is converted to CTranslate2's format and translates sentences of `test` in DATA,
the folder of `reluformer prepare`, to their natural ends. The same twin and the shipped model run
in the native library of this package. Contestants take turns, and the shortest time of each counts.
Seconds of the processor (`cpu`) are less sensitive to other processes than seconds of the clock;
with several threads they include waiting.

`agreement` counts sentences with the same tokens in CTranslate2 and here, with the twin in float32.
Greedy search is the same in both. Beam search is not: here an ended hypothesis keeps its place in
the beam, and CTranslate2 fills it again.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.ctranslate2 import COMPUTE_TYPES, Case
from benchmarks.ctranslate2_model import NEVER_DECODED, convert, to_ids, to_text
from reluformer.checkpoint import StoredRun, load_run, read_run
from reluformer.console import guarded
from reluformer.evaluation.aligned_files import read_aligned
from reluformer.files import write_json
from reluformer.info import commit, info
from reluformer.shipped import shipped_model
from reluformer.translation.native.model import NativeModel
from reluformer.translation.native.search import search
from reluformer.translation.search import SearchConfig

Ids = list[list[int]]
Decode = Callable[[Ids, int], Ids]
"""Function of a batch and the beam to the tokens of each sentence."""

CTRANSLATE2 = "softmax, CTranslate2"
TWIN = "softmax"
SHIPPED = "relu"


def native_decoder(stored: StoredRun, precision: Any) -> Decode:
    """A trained model in the native library."""
    model = NativeModel.read(stored.model, precision)

    def decode(sources: Ids, beam: int) -> Ids:
        return [hypothesis.tokens for hypothesis in search(model, sources, SearchConfig(beam=beam))]

    return decode


def ctranslate2_decoder(folder: Path, precision: str, threads: int) -> Decode:
    """A converted model in CTranslate2, with the settings of `SearchConfig`."""
    import ctranslate2

    translator = ctranslate2.Translator(
        str(folder), device="cpu", intra_threads=threads, compute_type=COMPUTE_TYPES[precision][1]
    )

    def decode(sources: Ids, beam: int) -> Ids:
        limits = [SearchConfig().longest(len(source)) for source in sources]
        results = translator.translate_batch(
            to_text(sources),
            beam_size=beam,
            max_decoding_length=max(limits),
            max_input_length=0,
            length_penalty=1.0,
            suppress_sequences=NEVER_DECODED,
        )
        # CTranslate2 has one limit for all sentences of a batch.
        pairs = zip(results, limits, strict=True)
        return [to_ids(result.hypotheses[0][:limit]) for result, limit in pairs]

    return decode


def translate(decode: Decode, sources: Ids, batch: int, beam: int) -> Ids:
    """Translate the sources in batches, in their order."""
    parts = [sources[first : first + batch] for first in range(0, len(sources), batch)]
    return [tokens for part in parts for tokens in decode(part, beam)]


class Benchmark:
    """The models and sentences of a comparison.

    Args:
        twin: The softmax twin.
        shipped: The model that it is compared with; both have the same tokenizer.
        converted: Folder with the twin in CTranslate2's format, one folder for each precision.
        texts: Source sentences.
    """

    def __init__(
        self, twin: StoredRun, shipped: StoredRun, converted: Path, texts: Sequence[str]
    ) -> None:
        self.stored, self.converted = {TWIN: twin, SHIPPED: shipped}, converted
        # Batches of similar lengths, as both libraries form them.
        self.sources = sorted(shipped.tokenizer.encode_batch(texts), key=len)

    def decoders(self, precision: str, threads: int) -> dict[str, Decode]:
        """All contestants."""
        theirs = ctranslate2_decoder(self.converted / precision, precision, threads)
        ours = {name: native_decoder(run, precision) for name, run in self.stored.items()}
        return {CTRANSLATE2: theirs, **ours}

    def agreement(self, beam: int) -> dict[str, Any]:
        """Number of sentences with the same tokens in CTranslate2 and here, in float32."""
        decoders = self.decoders("float32", 1)
        theirs, ours = (translate(decoders[n], self.sources, 16, beam) for n in (CTRANSLATE2, TWIN))
        same = sum(one == other for one, other in zip(theirs, ours, strict=True))
        row = {"beam": beam, "sentences": len(ours), "same": same, "tokens": sum(map(len, ours))}
        print(row, flush=True)
        return row

    def measure(self, case: Case, turns: int) -> dict[str, Any]:
        """One row of the table: tokens per second of each contestant, and ratios."""
        torch.set_num_threads(case.threads)
        decoders = self.decoders(case.precision, case.threads)
        seconds = {name: [float("inf"), float("inf")] for name in decoders}
        outputs: dict[str, Ids] = {}
        for _, (name, decode) in product(range(turns), decoders.items()):
            began = time.perf_counter(), time.process_time()
            outputs[name] = translate(decode, self.sources, case.batch, case.beam)
            spent = time.perf_counter() - began[0], time.process_time() - began[1]
            seconds[name] = [min(pair) for pair in zip(seconds[name], spent, strict=True)]
        row: dict[str, Any] = vars(case).copy()
        for name, tokens in outputs.items():
            # The end token is a step, too.
            count = sum(len(ids) + 1 for ids in tokens)
            rates = [round(count / spent, 1) for spent in seconds[name]]
            row[name] = {"tokens": count, "tokens/s": rates[0], "tokens/s cpu": rates[1]}
        for name in (TWIN, SHIPPED):
            for rate in ("tokens/s", "tokens/s cpu"):
                ratio = row[name][rate] / row[CTRANSLATE2][rate]
                row[f"{name} / CTranslate2, {rate}"] = round(ratio, 2)
        print(row, flush=True)
        return row


def sentences_of(data: Path, count: int) -> list[str]:
    """Sentences of `test` at equal distances."""
    documents, _ = read_aligned(data / "test.source.txt", [])
    sentences = [sentence for (sentence,) in documents]
    return sentences[:: max(1, len(sentences) // count)][:count]


@guarded
def main(arguments: Sequence[str] | None = None) -> None:
    """Convert, compare and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--softmax", type=Path, required=True, help="run of the softmax twin")
    parser.add_argument("--model", type=Path, help="default: the shipped model")
    parser.add_argument("--data", type=Path, required=True, help="folder of `reluformer prepare`")
    parser.add_argument("--sentences", type=int, default=64, help="sentences that are timed")
    parser.add_argument("--agree", type=int, default=512, help="sentences that are compared")
    parser.add_argument("--precision", nargs="+", default=["int8", "float32"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--beam", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    stored = read_run(options.softmax), read_run(options.model or shipped_model())
    with tempfile.TemporaryDirectory() as temporary:
        folder, model = Path(temporary), load_run(options.softmax).model
        for precision in {*options.precision, "float32"}:
            convert(model, folder / precision, COMPUTE_TYPES[precision][0])
        compared = Benchmark(*stored, folder, sentences_of(options.data, options.agree))
        timed = Benchmark(*stored, folder, sentences_of(options.data, options.sentences))
        axes = (options.precision, options.threads, options.batch, options.beam)
        result = {
            "format": "reluformer trained models against CTranslate2 1",
            "commit": commit(),
            "info": info(),
            "sentences": len(timed.sources),
            "agreement": [compared.agreement(beam) for beam in options.beam],
            "rows": [timed.measure(Case(*values), options.turns) for values in product(*axes)],
        }
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
