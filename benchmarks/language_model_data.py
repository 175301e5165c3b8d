"""Token ids of document text for `benchmarks.language_model`, small enough to carry to a GPU.

    python -m benchmarks.language_model_data --out lm --tokens 34 \\
        --train train.0.en.xz train.1.en.xz train.2.en.xz --dev dev.en.xz

Input files have one sentence a line; a line `<d>` starts a document. A byte-level BPE is trained on
the first file. Sentences of a document are joined by `sep`, and documents end with `eos`. The
folder gets `tokenizer.json`, and `train.u16.xz` and `dev.u16.xz` with little-endian 16-bit ids.
"""

import argparse
import lzma
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from reluformer.console import guarded
from reluformer.data.tokenizer import EOS, Tokenizer
from reluformer.errors import UserError

Ids = np.ndarray[tuple[int], np.dtype[np.uint16]]

# Ids have two bytes: contexts and alignment of the compressor follow their position in an id.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 3, "lp": 1, "pb": 1}]


def read_ids(path: Path) -> Ids:
    """Token ids [N] of a file that `write_ids` wrote."""
    if not path.exists():
        raise UserError(f"--data must hold {path.name}, and {path} does not exist")
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")


def write_ids(path: Path, ids: Ids) -> None:
    """Write token ids [N] as compressed 16-bit integers."""
    path.write_bytes(lzma.compress(ids.astype("<u2").tobytes(), filters=_FILTERS))


def documents(paths: Iterable[Path]) -> Iterator[list[str]]:
    """Sentences of each document of xz-compressed files."""
    for path in paths:
        sentences: list[str] = []
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                if line.rstrip("\n") == "<d>":
                    if sentences:
                        yield sentences
                    sentences = []
                else:
                    sentences.append(line.rstrip("\n"))
        if sentences:
            yield sentences


def encode(tokenizer: Tokenizer, texts: Iterable[Sequence[str]], most: int) -> Ids:
    """Ids of documents, one after the other, at most `most` of them."""
    parts: list[Ids] = []
    count = 0
    for sentences in texts:
        parts.append(np.array([*tokenizer.encode_document(sentences), EOS], dtype=np.uint16))
        count += len(parts[-1])
        if count >= most:
            break
    return np.concatenate(parts)[:most]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the tokenizer, encode the text and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--tokens", type=float, default=34, help="millions of training tokens")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    sample = islice(documents(options.train[:1]), 20_000)
    lines = (sentence for sentences in sample for sentence in sentences)
    tokenizer = Tokenizer.train(lines, options.vocabulary)
    tokenizer.save(options.out / "tokenizer.json")
    most = int(options.tokens * 1e6)
    for name, paths in (("dev", [options.dev]), ("train", options.train)):
        ids = encode(tokenizer, documents(paths), most)
        target = options.out / f"{name}.u16.xz"
        write_ids(target, ids)
        print(f"{name}: {len(ids):,} tokens, {target.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    guarded(main)()
