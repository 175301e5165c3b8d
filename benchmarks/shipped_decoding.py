"""Zeros of the shipped model, the speed that they gain, and agreement of its decoders.

    python -m benchmarks.shipped_decoding --data DATA --out FILE            # the shipped model
    python -m benchmarks.shipped_decoding --data DATA --model RUN --out FILE

Sources are the first documents of `test` in DATA, the folder of `reluformer prepare`; without
`--data`, the documents that are shipped with the model.

- `zeros`: shares of attention weights and of feed-forward slots that are exactly zero, in torch,
  with teacher forcing on the translations.
- `speed`: the native library, and the same library built with READ_ZEROS, which reads all slots and
  values, in CPU seconds of one thread. Both take turns, and the shortest time of each counts. The
  `skipped` shares are those that the first did not read: a slot must be zero in all rows of a
  block, and a single block reads the whole table unless at most a quarter of the slots has weight.
- `agreement`: documents whose translation in float32 is the same, token by token, in torch and in
  the native library.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from reluformer.checkpoint import StoredRun, load_run, read_run
from reluformer.console import guarded
from reluformer.data.tokenizer import Tokenizer
from reluformer.diagnostics import attention_maps, memory_reports
from reluformer.evaluation.aligned_files import Documents, read_aligned
from reluformer.files import write_json
from reluformer.info import commit, info
from reluformer.model import ReLUFormer
from reluformer.ops.backends.cpu.native import library
from reluformer.shipped import TEST_REFERENCE, TEST_SOURCE, shipped_model
from reluformer.translation.engine import Precision
from reluformer.translation.native.model import NativeModel
from reluformer.translation.native.search import search as native_search
from reluformer.translation.search import Hypothesis, SearchConfig, search

Ids = list[list[int]]
PRECISIONS: tuple[Precision, ...] = ("int8", "float32")


def sources_of(
    data: Path | None, model: Path, tokenizer: Tokenizer, count: int, longest: int
) -> Ids:
    """Ids of the first documents, each cut after the last sentence that fits."""
    files = (TEST_SOURCE, TEST_REFERENCE) if data is None else ("test.source.txt",) * 2
    documents: Documents
    documents, _ = read_aligned(
        (data or model) / files[0], [(data or model) / files[1]], documents=data is not None
    )
    result = []
    for document in documents[:count]:
        kept = list(document)
        while len(kept) > 1 and len(tokenizer.encode_document(kept)) >= longest:
            kept.pop()
        result.append(tokenizer.encode_document(kept)[: longest - 1])
    return result


@contextmanager
def library_without_skipping(folder: Path) -> Iterator[None]:
    """Native models are created in a library that reads rows without weight, too."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    with patch.dict(os.environ, {"CXX": f"{compiler} -DREAD_ZEROS"}):
        dense = library.Kernels(library.build(folder))
    with patch.object(library, "load", lambda: dense):
        yield


def translate(model: NativeModel, sources: Ids, batch: int, beam: int) -> list[Hypothesis]:
    """Translate the sources in batches, in their order."""
    config = SearchConfig(beam=beam)
    parts = [sources[first : first + batch] for first in range(0, len(sources), batch)]
    return [hypothesis for part in parts for hypothesis in native_search(model, part, config)]


def speeds(stored: StoredRun, sources: Ids, turns: int) -> list[dict[str, Any]]:
    """Tokens per second with and without skipping, by precision, batch and beam."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for precision in PRECISIONS:
            skipping = NativeModel.read(stored.model, precision)
            with library_without_skipping(Path(folder)):
                reading = NativeModel.read(stored.model, precision)
            for batch, beam in product((1, 16), (1, 5)):
                row = {"precision": precision, "batch": batch, "beam": beam}
                rows.append(row | _race(skipping, reading, sources, batch, beam, turns))
                print(rows[-1], flush=True)
    return rows


def _race(
    skipping: NativeModel, reading: NativeModel, sources: Ids, batch: int, beam: int, turns: int
) -> dict[str, Any]:
    seconds = {"skipping": [0.0] * turns, "reading": [0.0] * turns}
    before = vars(skipping.skipped).copy()
    tokens = {}
    for turn in range(turns):
        for name, model in (("skipping", skipping), ("reading", reading)):
            began = time.process_time()
            result = translate(model, sources, batch, beam)
            seconds[name][turn] = time.process_time() - began
            tokens[name] = [hypothesis.tokens for hypothesis in result]
    assert tokens["skipping"] == tokens["reading"], "skipping zeros has changed a translation"
    count = sum(map(len, tokens["skipping"]))
    counts = {name: value - before[name] for name, value in vars(skipping.skipped).items()}
    best = {name: count / min(values) for name, values in seconds.items()}
    return {
        "tokens": count,
        "tokens_per_second": round(best["skipping"], 1),
        "without_skipping": round(best["reading"], 1),
        "gain": round(best["skipping"] / best["reading"], 3),
        "slots_skipped": round(1 - counts["slots_read"] / counts["slots"], 4),
        "values_skipped": round(1 - counts["values_read"] / counts["values"], 4),
    }


def zeros(model: ReLUFormer, sources: Ids, targets: Ids, bos: int, eos: int) -> dict[str, Any]:
    """Shares of exact zeros: attention weights by site and layer, slots by layer."""
    totals: dict[str, list[int]] = {}
    slots: dict[str, list[float]] = {}
    with torch.inference_mode():
        for source, target in zip(sources, targets, strict=True):
            batch = {
                "source": torch.tensor([[*source, eos]]),
                "target": torch.tensor([[bos, *target]]),
            }
            for (site, layer), weights in attention_maps(model, batch).items():
                visible = torch.ones(weights.shape[-2:], dtype=torch.bool)
                visible = visible.tril() if site == "decoder" else visible
                for name in (f"{site}.{layer}", site):
                    total = totals.setdefault(name, [0, 0])
                    total[0] += int(((weights == 0) & visible).sum())
                    total[1] += int(visible.sum()) * weights.shape[1]
            for report in memory_reports(model, batch):
                slots.setdefault(report.name, []).append(report.zeros)
    return {
        "attention": {name: round(empty / seen, 4) for name, (empty, seen) in totals.items()},
        "slots": {name: round(sum(shares) / len(shares), 4) for name, shares in slots.items()},
    }


def agreement(model: ReLUFormer, native: NativeModel, sources: Ids, beam: int) -> dict[str, Any]:
    """Number of documents with the same tokens in torch and in the native library."""
    config = SearchConfig(beam=beam)
    same = tokens = 0
    largest = 0.0
    for source in sources:
        (ours,), (theirs,) = (
            native_search(native, [source], config),
            search(model, [source], config),
        )
        same += ours.tokens == theirs.tokens
        tokens += len(theirs.tokens)
        largest = max(largest, abs(ours.score - theirs.score))
    row = {"beam": beam, "documents": len(sources), "same": same, "tokens": tokens}
    print(row, flush=True)
    return {**row, "largest_difference_of_scores": largest}


@guarded
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of `reluformer prepare`")
    parser.add_argument("--model", type=Path, help="default: the shipped model")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--agree", type=int, default=16, help="documents translated in torch, too")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder = options.model or shipped_model()
    stored, model = read_run(folder), load_run(folder).model
    tokenizer, longest = stored.tokenizer, stored.recipe.data.max_length
    count = max(options.documents, options.agree)
    sources = sources_of(options.data, folder, tokenizer, count, longest)
    timed = sources[: options.documents]
    native = NativeModel.read(stored.model, "float32")
    targets = [hypothesis.tokens for hypothesis in translate(native, timed, 16, 5)]
    result = {
        "format": "reluformer shipped decoding 1",
        "commit": commit(),
        "info": info(),
        "source_tokens": [len(ids) for ids in sources],
        "zeros": zeros(model, timed, targets, tokenizer.bos, tokenizer.eos),
        "agreement": [agreement(model, native, sources[: options.agree], beam) for beam in (1, 5)],
        "threads": torch.get_num_threads(),
        "speed": speeds(stored, timed, options.turns),
    }
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
