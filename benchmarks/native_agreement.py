"""Native decoding in float32 against the model in torch, token by token, on test documents.

    python -m benchmarks.native_agreement --data DATA --out FILE --seconds 1500

Both decoders translate the documents of `test` in DATA, the folder of `reluformer prepare`, as
`reluformer translate --document` does: in parts of up to `max_length` tokens, with greedy search
and with the beam of the recipe. FILE is written after every document. A second call continues
after the documents that FILE has, and `--seconds` ends a call early.

Sums in another order round differently, so that nearly equal candidates may change places. A
difference is therefore judged in float64:

- `score_gap`: score of the native hypothesis minus that of torch.
- `token_gap`: log-probability of the first different token of the native hypothesis minus that of
  torch, after the common tokens.
- `float64_search`: the hypothesis that the search in float64 finds: `native`, `torch` or `neither`.
"""

import copy
import json
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.model_card import parser_of
from reluformer.checkpoint import load_run, read_run
from reluformer.config.search import SearchConfig
from reluformer.console import guarded
from reluformer.errors import UserError
from reluformer.evaluation.aligned_files import Documents, read_aligned
from reluformer.files import sha256, write_json
from reluformer.info import commit, info
from reluformer.model import ReLUFormer
from reluformer.shipped import shipped_model
from reluformer.translation.engine import Ids, NativeEngine
from reluformer.translation.native.model import NativeModel
from reluformer.translation.search import Hypothesis, search
from reluformer.translation.translator import Translator

FORMAT = "reluformer native agreement 1"


class ComparingEngine(NativeEngine):
    """Searches with both decoders, counts what is equal, and returns the native hypotheses."""

    def __init__(self, native: NativeModel, model: ReLUFormer) -> None:
        super().__init__(native, lambda: model)
        self.counts: dict[str, Any] = {}
        self.reset()

    @cached_property
    def double(self) -> ReLUFormer:
        """The model in float64."""
        return copy.deepcopy(self.model).double()

    def reset(self) -> None:
        """Begin to count anew."""
        self.counts = {"texts": 0, "tokens": 0, "largest_score_gap": 0.0, "differences": []}

    def search(
        self, sources: Ids, config: SearchConfig, banned: tuple[int, ...], keys: Sequence[int]
    ) -> list[Hypothesis]:
        """Translate one batch with both decoders."""
        natives = super().search(sources, config, banned, keys)
        others = search(self.model, sources, config, banned=banned, keys=keys)
        for source, native, other in zip(sources, natives, others, strict=True):
            self.counts["texts"] += 1
            self.counts["tokens"] += len(other.tokens)
            if native.tokens == other.tokens:
                gap = max(self.counts["largest_score_gap"], abs(native.score - other.score))
                self.counts["largest_score_gap"] = gap
            else:
                difference = self._judge(source, native, other, config, banned)
                self.counts["differences"].append(difference)
        return natives

    def _judge(
        self,
        source: Sequence[int],
        native: Hypothesis,
        other: Hypothesis,
        config: SearchConfig,
        banned: tuple[int, ...],
    ) -> dict[str, Any]:
        """Describe a difference in float64."""
        (exact,) = search(self.double, [source], config, banned=banned)
        finders = {"native": native.tokens, "torch": other.tokens}
        names = [name for name, tokens in finders.items() if tokens == exact.tokens]
        mine, theirs = (self._log_probabilities(source, h.tokens) for h in (native, other))
        eos = self.config.eos_id
        pairs = zip((*native.tokens, eos), (*other.tokens, eos), strict=False)
        first = next(place for place, (one, two) in enumerate(pairs) if one != two)
        scores = [config.score(sum(values), len(values)) for values in (mine, theirs)]
        return {
            "source_tokens": len(source),
            "tokens": [len(native.tokens), len(other.tokens)],
            "first_difference": first,
            "scores": scores,
            "score_gap": scores[0] - scores[1],
            "token_gap": mine[first] - theirs[first],
            "float64_search": names[0] if names else "neither",
        }

    @torch.inference_mode()
    def _log_probabilities(self, source: Sequence[int], tokens: list[int]) -> list[float]:
        """Log-probabilities of the tokens and the end token in float64."""
        config = self.config
        target = torch.tensor([[config.bos_id, *tokens, config.eos_id]])
        ids = torch.tensor([[*source, config.eos_id]])
        logits = self.double(ids, target[:, :-1]).logits
        chosen = logits.log_softmax(-1).gather(-1, target[:, 1:, None])
        values: list[float] = chosen.flatten().tolist()
        return values


def compare(
    translators: Sequence[Translator], document: Sequence[str], number: int
) -> Iterator[dict[str, Any]]:
    """Translate a document with each search; yield one row for each."""
    for translator in translators:
        engine = translator.engine
        assert isinstance(engine, ComparingEngine)
        engine.reset()
        translator.lines(document, together=True)
        yield {
            "document": number,
            "sentences": len(document),
            "beam": translator.config.beam,
            **engine.counts,
        }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Totals of each beam over documents."""
    totals = []
    for beam in sorted({row["beam"] for row in rows}):
        chosen = [row for row in rows if row["beam"] == beam]
        differences = [len(row["differences"]) for row in chosen]
        totals.append({
            "beam": beam,
            "documents": len(chosen),
            "same_documents": differences.count(0),
            "sentences": sum(row["sentences"] for row in chosen),
            "texts": sum(row["texts"] for row in chosen),
            "same_texts": sum(row["texts"] for row in chosen) - sum(differences),
            "tokens": sum(row["tokens"] for row in chosen),
            "largest_score_gap": max(row["largest_score_gap"] for row in chosen),
        })  # fmt: skip
    return totals


def translators_of(folder: Path) -> list[Translator]:
    """Translators with greedy search and with the recipe's beam, around one comparing engine."""
    stored = read_run(folder)
    engine = ComparingEngine(NativeModel.read(stored.model, "float32"), load_run(folder).model)
    engine.model.eval()
    decode, data = stored.recipe.decode, stored.recipe.data
    return [
        Translator(
            engine,
            stored.tokenizer,
            trained_length=data.max_length,
            documents=data.unit == "document",
            config=SearchConfig(
                beam=beam, length_penalty=decode.length_penalty, max_length=decode.max_length
            ),
        )
        for beam in sorted({1, decode.beam})
    ]


def _load(out: Path, files: dict[str, str]) -> dict[str, Any]:
    """The result to continue, or an empty one."""
    if not out.is_file():
        return {"format": FORMAT, "commit": commit(), "info": info(), "files": files, "rows": []}
    result: dict[str, Any] = json.loads(out.read_text("utf-8"))
    if result.get("files") != files:
        raise UserError(f"--out {out} was measured with another model or other documents")
    return result


@guarded
def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the decoders and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--documents", type=int, help="default: all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="default: no limit")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write or continue")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    torch.set_num_threads(options.threads)
    folder, source = options.model or shipped_model(), options.data / "test.source.txt"
    weights = sorted(folder.glob("*.safetensors"))
    result = _load(options.out, {file.name: sha256(file) for file in (source, *weights)})
    documents: Documents
    documents, _ = read_aligned(source, [], documents=True)
    translators = translators_of(folder)
    done = {row["document"] for row in result["rows"]}
    for number, document in enumerate(documents[: options.documents]):
        if number in done:
            continue
        if time.monotonic() - began > options.seconds:
            break
        result["rows"] += compare(translators, document, number)
        result["threads"], result["summary"] = options.threads, summary(result["rows"])
        write_json(options.out, result)
    for row in result.get("summary", []):
        print(row, flush=True)


if __name__ == "__main__":
    main()
