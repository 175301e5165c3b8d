"""The tokenizer is lossless for every text."""

import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reluformer.data import tokenizer as module
from reluformer.data.synthetic import sample
from reluformer.data.tokenizer import BOS, EOS, MIN_VOCAB, PAD, SEP, Tokenizer
from reluformer.errors import UserError

UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
# Spaces of many kinds between words, so that both ways of encoding are taken.
SPACED = st.lists(
    st.sampled_from([" ", " ", "  ", "\t", "\u2028", "\xa0", "\x1f", "don't", "'s", "a1234", "ä…!"])
).map("".join)


@settings(max_examples=100)
@given(text=st.one_of(UNICODE, SPACED))
def test_round_trip_is_exact(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(SEP < i < tokenizer.vocab_size for i in ids)


@settings(max_examples=100)
@given(texts=st.lists(st.one_of(UNICODE, SPACED), max_size=4))
def test_the_word_cache_does_not_change_ids(tokenizer: Tokenizer, texts: list[str]) -> None:
    library = tokenizer._bpe
    expected = [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert tokenizer.encode_batch(texts) == expected


def test_the_word_cache_does_not_change_the_ids_of_the_sample(tokenizer: Tokenizer) -> None:
    texts = [line for pair in sample.sentences(7, 500) for line in pair]
    library = tokenizer._bpe
    expected = [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert tokenizer.encode_batch(texts) == expected


def test_the_word_cache_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Tokenizer(tokenizer.specification)
    monkeypatch.setattr(module, "_CACHED_WORDS", 5)
    text = " ".join(f"word{number}" for number in range(50))
    assert fresh.decode(fresh.encode(text)) == text
    assert fresh.decode(fresh.encode("x" * 65)) == "x" * 65
    assert len(fresh._first) == 1


SPECIAL = ["<sep>", "‹sep›", "‹pad›‹bos›‹eos›", "<d>"]
UNSEEN = ["مرحبا بالعالم", "שלום", "👩\u200d👩\u200d👧", "e\u0301", "\x00\x07\x1b[0m", "漢字"]


@pytest.mark.parametrize("text", [*SPECIAL, *UNSEEN])
def test_special_names_and_unseen_scripts_are_encoded_as_text(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and min(ids) > SEP


def test_special_names_in_training_text_are_encoded_as_text() -> None:
    tokenizer = Tokenizer.train(["‹sep› <sep> ‹pad›"] * 50, MIN_VOCAB + 40)
    assert tokenizer.decode(tokenizer.encode("‹sep›")) == "‹sep›"
    assert min(tokenizer.encode("‹sep› ‹pad›")) > SEP


@given(sentences=st.lists(UNICODE, min_size=1, max_size=5))
def test_documents_round_trip(tokenizer: Tokenizer, sentences: list[str]) -> None:
    ids = tokenizer.encode_document(sentences)
    assert ids.count(SEP) == len(sentences) - 1
    assert tokenizer.decode_document([BOS, *ids, EOS, PAD, PAD]) == sentences


@pytest.mark.parametrize(
    "unit", ["a", " ", "9", ".", "ab ", "\u202b", "😀", "\u0301", "aB", "\t", "'s"]
)
def test_time_is_linear_in_the_length_of_a_line(tokenizer: Tokenizer, unit: str) -> None:
    text = (unit * 100_000)[:100_000]
    start = time.perf_counter()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # About 0.1 s when the machine is idle; quadratic time would take minutes.
    assert time.perf_counter() - start < 10


def test_training_on_long_lines_terminates() -> None:
    start = time.perf_counter()
    Tokenizer.train(["ab" * 50_000, "x" * 100_000, " " * 100_000, "😀" * 100_000], 400)
    assert time.perf_counter() - start < 10


def test_training_is_deterministic_across_processes(tmp_path: Path) -> None:
    script = (
        "from reluformer.data.synthetic import sample\n"
        "from reluformer.data.tokenizer import Tokenizer\n"
        "lines = [line for pair in sample.sentences(0, 1000) for line in pair]\n"
        "print(Tokenizer.train(lines, 700).sha256)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = [*chain.from_iterable(sample.sentences(0, 1000))]
    assert run.stdout.strip() == Tokenizer.train(iter(lines), 700).sha256


def test_saving_and_loading(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.sha256, loaded.vocab_size) == (tokenizer.sha256, 1000)
    assert loaded.encode("dreiundzwanzig") == tokenizer.encode("dreiundzwanzig")
    assert (loaded.pad, loaded.bos, loaded.eos, loaded.sep) == (0, 1, 2, 3)


def test_vocabulary_is_smaller_when_there_is_nothing_to_learn() -> None:
    assert Tokenizer.train([], 1000).vocab_size == MIN_VOCAB


def test_invalid_arguments_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size must be from 260, .* to 262144, got 100"):
        Tokenizer.train([], 100)
    with pytest.raises(UserError, match="lone surrogate"):
        tokenizer.encode("a \ud800b")
    with pytest.raises(UserError, match="lone surrogate"):
        tokenizer.encode("a  \ud800b")
    with pytest.raises(UserError, match="nothing.json cannot be read"):
        Tokenizer.load(tmp_path / "nothing.json")
    broken = tmp_path / "broken.json"
    broken.write_bytes(b"\xff{")
    with pytest.raises(UserError, match="broken.json is not UTF-8 text"):
        Tokenizer.load(broken)
    broken.write_text(tokenizer.specification.replace("‹sep›", "<sep>"), encoding="utf-8")
    with pytest.raises(UserError, match="the ids 0 to 3 must be ‹pad›, "):
        Tokenizer.load(broken)
