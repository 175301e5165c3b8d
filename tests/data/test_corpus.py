"""Encoded corpora: exact, memory-mapped, complete or absent."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reluformer.data.corpus import MANIFEST, Corpus, write_corpus
from reluformer.data.synthetic import sample
from reluformer.data.tokenizer import SEP, Tokenizer
from reluformer.errors import UserError

DOCUMENTS = [*sample.documents(4, 20)]


def write(folder: Path, tokenizer: Tokenizer, documents: list, chunk: int = 7) -> None:
    numbered = [(*pair, 3 * n) for n, document in enumerate(documents) for pair in document]
    with write_corpus(folder, tokenizer) as writer:
        for first in range(0, len(numbered), chunk):
            sources, targets, numbers = zip(*numbered[first : first + chunk], strict=True)
            encoded = [tokenizer.encode_batch(texts) for texts in (sources, targets)]
            writer.add(encoded[0], encoded[1], numbers)


def same(first: Corpus, second: Corpus) -> bool:
    arrays = [
        (corpus.source.tokens, corpus.source.offsets, corpus.target.tokens, corpus.target.offsets)
        + (corpus.documents,)
        for corpus in (first, second)
    ]
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(*arrays, strict=True))


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_disk_and_memory_hold_equal_arrays(
    tokenizer: Tokenizer, tmp_path: Path, chunk: int
) -> None:
    write(tmp_path / "c", tokenizer, DOCUMENTS, chunk)
    corpus = Corpus.open(tmp_path / "c")
    assert same(corpus, Corpus.in_memory(DOCUMENTS, tokenizer))
    assert isinstance(corpus.source.tokens.base, np.memmap)
    assert np.diff(corpus.documents).tolist() == [len(document) for document in DOCUMENTS]
    pairs = [pair for document in DOCUMENTS for pair in document]
    assert len(corpus) == len(pairs)
    for index, (source, target) in enumerate(pairs):
        assert tokenizer.decode(corpus.source.sentence(index)) == source
        assert tokenizer.decode(corpus.target.sentence(index)) == target
    manifest = json.loads((tmp_path / "c" / MANIFEST).read_text())
    ids = [sum(map(len, tokenizer.encode_batch(side))) for side in zip(*pairs, strict=True)]
    assert [manifest["source_tokens"], manifest["target_tokens"]] == ids
    assert (corpus.vocab_size, corpus.tokenizer_sha256) == (1000, tokenizer.sha256)


@given(
    documents=st.lists(
        st.lists(st.tuples(st.text("ab \n😀"), st.text("ab \n😀")), max_size=3), max_size=4
    )
)
def test_any_span_is_one_slice(tokenizer: Tokenizer, documents: list) -> None:
    corpus = Corpus.in_memory(documents, tokenizer)
    pairs = [pair for document in documents for pair in document]
    for first in range(len(pairs)):
        for end in range(first + 1, len(pairs) + 1):
            side = corpus.target
            ids = side.tokens[side.offsets[first] : side.offsets[end]]
            assert ids[-1] == SEP
            assert len(ids) == side.lengths(np.array([[first, end]]))[0]
            expected = [target for _, target in pairs[first:end]]
            assert tokenizer.decode_document(ids[:-1].tolist()) == expected


def test_large_vocabularies_get_wider_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    wide = Tokenizer(tokenizer.specification)
    wide.vocab_size = 2**16 + 1
    write(tmp_path / "c", wide, DOCUMENTS)
    corpus = Corpus.open(tmp_path / "c")
    assert corpus.source.tokens.dtype == np.uint32
    assert Corpus.in_memory(DOCUMENTS, tokenizer).source.tokens.dtype == np.uint16
    assert tokenizer.decode(corpus.source.sentence(0)) == DOCUMENTS[0][0][0]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_interrupted_writing_leaves_nothing(
    tokenizer: Tokenizer, tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), write_corpus(tmp_path / "c", tokenizer) as writer:
        writer.add([[5, 6]], [[7]], [0])
        raise error
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="c does not exist"):
        Corpus.open(tmp_path / "c")


def test_the_manifest_is_written_last(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, value: object) -> None:
        names = {"source.tokens", "source.offsets", "target.tokens", "target.offsets", "documents"}
        assert {p.name for p in path.parent.iterdir()} == names
        raise OSError("disk full")

    monkeypatch.setattr("reluformer.data.corpus.write_json", fail)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "c", tokenizer, DOCUMENTS)
    assert list(tmp_path.iterdir()) == []


def test_damaged_folders_are_refused_in_one_sentence(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    write(folder, tokenizer, DOCUMENTS)
    tokens, manifest = folder / "target.tokens", folder / MANIFEST
    whole, listing = tokens.read_bytes(), manifest.read_text()
    tokens.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=f"target.tokens has {len(whole) - 1} bytes, but"):
        Corpus.open(folder)
    tokens.unlink()
    with pytest.raises(UserError, match="target.tokens is missing"):
        Corpus.open(folder)
    tokens.write_bytes(whole)
    for text, message in [
        (listing[:50], "manifest.json is not valid JSON"),
        ("[]", "manifest.json must contain a JSON object"),
        (listing.replace("corpus 1", "corpus 2"), "has format 'reluformer corpus 2'"),
        (json.dumps({"format": "reluformer corpus 1"}), "manifest.json.sentences is required"),
    ]:
        manifest.write_text(text)
        with pytest.raises(UserError, match=message):
            Corpus.open(folder)
    manifest.unlink()
    with pytest.raises(UserError, match="manifest.json is missing; prepare it again"):
        Corpus.open(folder)


def test_an_empty_corpus_is_allowed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "c", tokenizer, [])
    assert len(Corpus.open(tmp_path / "c")) == len(Corpus.in_memory([], tokenizer)) == 0
