"""The translator: kinds of input, documents, long lines, attention maps, arbitrary text."""

import io
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reluformer.data.tokenizer import SEP, Tokenizer
from reluformer.errors import UserError
from reluformer.model import ModelConfig, ReLUFormer
from reluformer.translation.line_reader import LineReader
from reluformer.translation.search import Hypothesis, SearchConfig
from reluformer.translation.stream import translate_stream
from reluformer.translation.translator import Translator

BYTES = Tokenizer.train(["the cat sat on the mat"], 265)
SHORT = SearchConfig(beam=2, max_ratio=0.1, max_extra=3)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat", "the dog ate the cat"] * 3, 290)


def make(tokenizer: Tokenizer, config: SearchConfig = SHORT, **settings) -> Translator:
    torch.manual_seed(0)
    shape = {"width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "slots": 16}
    model = ReLUFormer(ModelConfig(vocabulary=tokenizer.vocab_size, **shape))
    return Translator(model, tokenizer, config=config, **{"trained_length": 32, **settings})


class Shouting(Translator):
    """Translates into upper case, after `mistake` has changed the sentences."""

    seen: list[list[str]]
    complete = True

    @staticmethod
    def mistake(sentences: list[str]) -> list[str]:
        return sentences

    def translate_ids(self, sources, *, banned=()):
        found = []
        for source in sources:
            sentences = self.tokenizer.decode_document(source)
            self.seen.append(sentences)
            if SEP not in banned:
                sentences = self.mistake(sentences)
            ids = self.tokenizer.encode_document([s.upper() for s in sentences])
            found.append(Hypothesis(ids, 0.0, 0.0, self.complete or len(sentences) == 1))
        return found


@pytest.fixture
def shouting(tokenizer: Tokenizer) -> Shouting:
    plain = make(tokenizer)
    translator = Shouting(plain.model, tokenizer, trained_length=32)
    translator.seen = []
    return translator


def test_text_gives_text_and_a_list_gives_a_list(shouting: Shouting) -> None:
    assert shouting("the cat") == "THE CAT"
    assert shouting("the cat\n\nthe dog\n") == "THE CAT\n\nTHE DOG\n"
    assert shouting(["the cat", "", "the dog\nsat"]) == ["THE CAT", "", "THE DOG\nSAT"]
    assert shouting([]) == []
    assert shouting("") == ""
    assert shouting(" \t ") == ""
    assert all(len(sentences) == 1 for sentences in shouting.seen)


def test_document_marks_are_text_outside_documents(
    shouting: Shouting,
) -> None:
    assert shouting(["<d>"]) == ["<D>"]
    assert shouting.document(["<d>", "the cat"]) == ["<d>", "THE CAT"]


def test_sentences_of_a_document_are_translated_together(shouting: Shouting) -> None:
    text = "<d>\nthe cat\nsat\n\nthe dog\nate\nthe mat"
    assert shouting.document(text) == "<d>\nTHE CAT\nSAT\n\nTHE DOG\nATE\nTHE MAT"
    assert shouting.seen == [["the cat", "sat"], ["the dog", "ate", "the mat"]]
    assert shouting.document(["the cat\nsat", "the dog"]) == ["THE CAT SAT", "THE DOG"]


def test_a_sentence_model_translates_documents_by_sentence(
    tokenizer: Tokenizer, shouting: Shouting, caplog: pytest.LogCaptureFixture
) -> None:
    shouting.documents = False
    assert shouting.document(["the cat", "sat", "<d>"]) == ["THE CAT", "SAT", "<d>"]
    assert shouting.seen == [["the cat"], ["sat"]]
    assert "single sentences" in caplog.text


MISTAKES = {
    "drops the first": lambda s: s[1:] if len(s) > 2 else s,
    "drops the last": lambda s: s[:-1],
    "joins two": lambda s: [" ".join(s[:2]), *s[2:]],
    "says one twice": lambda s: [s[0], s[0], *s[1:]],
    "says one in place of another": lambda s: [s[0], *s[:-1]],
    "leaves one empty": lambda s: [" ", *s[1:]],
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_span_with_a_wrong_number_of_sentences_is_translated_again(
    shouting: Shouting, mistake
) -> None:
    shouting.mistake = mistake
    sentences = ["the cat", "sat", "on", "the mat", "the dog", "ate"]
    assert shouting.document(sentences) == [s.upper() for s in sentences]
    assert [len(seen) for seen in shouting.seen][0] == 6
    assert len(shouting.seen) > 1


def test_an_incomplete_document_is_translated_again(
    shouting: Shouting, caplog: pytest.LogCaptureFixture
) -> None:
    shouting.complete = False
    assert shouting.document(["the cat", "sat", "on"]) == ["THE CAT", "SAT", "ON"]
    assert [len(seen) for seen in shouting.seen] == [3, 2, 1, 1, 1]
    assert not caplog.records


@given(
    st.lists(st.sampled_from(["the cat", "sat", "", "<d>", "on " * 40, "x" * 99]), max_size=30),
    st.randoms(use_true_random=False),
)
@settings(max_examples=50)
def test_documents_keep_their_lines_whatever_the_model_returns(
    lines: list[str], rng: random.Random
) -> None:
    translator = Shouting(make(BYTES).model, BYTES, trained_length=24)
    translator.seen = []
    mistakes = [*MISTAKES.values(), lambda s: s]
    translator.mistake = lambda s: rng.choice(mistakes)(s) if s else s
    expected = [line if line == "<d>" else line.strip().upper() for line in lines]
    assert translator.document(lines) == expected


def test_a_long_line_is_translated_in_pieces_with_a_warning(
    shouting: Shouting, caplog: pytest.LogCaptureFixture
) -> None:
    line = "the cat sat. " * 30
    assert shouting(["on", line]) == ["ON", line.strip().upper()]
    assert len(shouting.seen) > 3
    lengths = [len(ids) for (text,) in shouting.seen for ids in [shouting.tokenizer.encode(text)]]
    assert max(lengths) <= 31
    assert "line 2" in caplog.text and "31 tokens" in caplog.text


def test_a_translation_of_maximum_length_is_reported(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    make(tokenizer)(["", "the cat sat"])
    assert "line 2" in caplog.text and "incomplete" in caplog.text


def test_a_length_beyond_training_is_reported(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    make(tokenizer, SearchConfig(max_length=64))
    assert "trained on at most 32" in caplog.text
    with pytest.raises(UserError, match="max_length"):
        SearchConfig(max_length=1)


def test_invalid_settings_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="batch_tokens"):
        make(tokenizer, batch_tokens=0)
    with pytest.raises(UserError, match="beem is not a setting of the search, allowed: .*beam"):
        Translator.load("nowhere", beem=3)
    with pytest.raises(UserError, match="nowhere"):
        Translator.load("nowhere", beam=3)


def test_results_do_not_depend_on_the_batches(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    texts = [" ".join(rng.choices(["the", "cat", "dog", "sat"], k=k % 9 + 1)) for k in range(40)]
    config = SearchConfig(beam=2, max_extra=2, max_ratio=1)
    together = make(tokenizer, config)(texts)
    assert make(tokenizer, config, batch_tokens=1)(texts) == together
    assert len(set(together)) > 5


def test_the_same_text_gets_the_same_sample(tokenizer: Tokenizer) -> None:
    translator = make(tokenizer, SearchConfig(method="sample", max_extra=8, seed=3))
    first, second, third = translator(["the cat", "the dog sat on the mat", "the cat"])
    assert first == third != second
    assert translator("the dog sat on the mat") == second


def test_attention_maps_have_the_shapes_of_their_tokens(tokenizer: Tokenizer) -> None:
    translator = make(tokenizer)
    with translator.recording() as maps:
        translator(["the cat sat", "the"])
        translator.document(["the cat", "the dog"])
    assert len(maps) >= 3
    for found in maps:
        s, t = len(found.source), len(found.target)
        assert found.encoder.shape == (1, 2, s, s)
        assert found.decoder.shape == (1, 2, t, t)
        assert found.cross.shape == (1, 2, t, s)
        assert found.source[-1] == "<eos>" and found.target[0] == "<bos>"
    sources = ["".join(found.source[:-1]) for found in maps]
    assert "the cat sat" in sources
    translator("the")
    assert len(maps) == len(sources)


ANYTHING = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("\0\x07\x1b\x85\u2028\u200f\u202e\ufeff🏳️‍🌈👩🏽‍🚀עִבְרִיתالعربية\U0010ffff"),
    ),
    max_size=80,
)


@given(st.lists(ANYTHING, max_size=4), st.booleans())
@settings(max_examples=40)
def test_any_text_gives_one_line_per_line(lines: list[str], document: bool) -> None:
    translator = make(BYTES, SearchConfig(beam=1, max_ratio=0, max_extra=2), trained_length=16)
    lines = [line.replace("\n", " ") for line in lines]
    found = translator.document(lines) if document else translator(lines)
    assert len(found) == len(lines)
    for line, text in zip(lines, found, strict=True):
        assert len(text.splitlines()) <= 1
        if not line.strip():
            assert text == ""


def test_a_line_of_100_000_characters(tokenizer: Tokenizer) -> None:
    translator = make(tokenizer, SearchConfig(beam=1, max_ratio=0, max_extra=1), trained_length=256)
    assert len(translator(["x" * 100_000, "the cat " * 12_500])) == 2


def test_text_that_is_not_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="surrogate"):
        make(tokenizer)("the \ud800 cat")


def test_files(shouting: Shouting, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("the cat\n\n<d>\nthe dog", encoding="utf-8")
    shouting.file(tmp_path / "source", tmp_path / "target", document=True)
    assert (tmp_path / "target").read_text(encoding="utf-8") == "THE CAT\n\n<d>\nTHE DOG\n"
    with pytest.raises(UserError, match="missing"):
        shouting.file(tmp_path / "missing", tmp_path / "target")


def test_a_translator_can_be_pickled(tokenizer: Tokenizer) -> None:
    translator = make(tokenizer)
    copied = pickle.loads(pickle.dumps(translator))
    assert copied("the cat") == translator("the cat")


def test_the_warning_about_long_lines_counts_the_lines_of_the_input(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    source = LineReader(io.BytesIO(b"the cat sat on the mat " * 8 + b"\n"), "input")
    translate_stream(make(tokenizer, replace(SHORT, max_length=16)), source, io.BytesIO())
    assert "1 of 1 line(s) have more than 15 tokens" in caplog.text


@pytest.mark.parametrize("text", [5, None, ["a", None], b"abc", torch.tensor([3, 4]), [["a"]]])
def test_only_strings_are_text(tokenizer: Tokenizer, text: Any) -> None:
    translator = make(tokenizer)
    for translate in (translator, translator.document, translator.lines):
        with pytest.raises(UserError, match="^text must be a string or a list of strings, got "):
            translate(text)


@pytest.mark.parametrize(
    "ids",
    [[3, 4], torch.tensor([3, 4]), 5, None, "ab", ["ab"], [[3.0]], [[2**70]], [[[3]]]],
)
def test_ids_of_one_text_are_not_a_list_of_texts(tokenizer: Tokenizer, ids: Any) -> None:
    with pytest.raises(UserError, match="^sources must be one list of token ids for each text"):
        make(tokenizer).translate_ids(ids)


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, wrong: int) -> None:
    with pytest.raises(UserError, match=f"^sources must hold ids from 0 to .*, got {wrong} in"):
        make(tokenizer).translate_ids([[3], [4, wrong]])
