"""Segmentation of long lines and documents: no text is lost, every span fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reluformer.translation.segments import SegmentedLines, Span, pack, split_line


def characters(texts):
    """Replaces the tokenizer: every character is a token."""
    return [[ord(c) for c in text] for text in texts]


def words(texts):
    """Replaces the tokenizer: every word is a token."""
    return [[1] * len(text.split()) for text in texts]


def test_a_long_line_is_split_after_sentences() -> None:
    text = "One is here. Two is there! Three? Four, and this one is long, goes on."
    cut = split_line(text, 30, characters)
    assert [piece.text for piece in cut] == [
        "One is here. Two is there!",
        "Three?",
        "Four, and this one is long,",
        "goes on.",
    ]


def test_a_line_without_punctuation_is_split_between_words_and_then_anywhere() -> None:
    cut = [piece.text for piece in split_line("aaa bbb ccc ddddddddddd e", 7, characters)]
    assert cut == ["aaa bbb", "ccc", "ddddd", "dddddd", "e"]


@given(st.text(min_size=1, max_size=300), st.integers(1, 40))
def test_pieces_and_their_spaces_concatenate_to_the_text(text: str, limit: int) -> None:
    text = text.strip() or "x"
    cut = split_line(text, limit, characters)
    assert "".join(piece.text + piece.space for piece in cut) == text
    assert all(0 < len(piece.text) <= limit for piece in cut)


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_spans_contain_every_sentence_once(lengths: list[int], limit: int) -> None:
    spans = pack(lengths, limit)
    assert [i for span in spans for i in range(span.first, span.end)] == list(range(len(lengths)))
    for span in spans:
        total = sum(lengths[span.first : span.end]) + len(span) - 1
        assert total <= limit or len(span) == 1
    for before, after in zip(spans, spans[1:], strict=False):
        # Greedy: the next sentence would not have fitted.
        assert sum(lengths[before.first : after.first + 1]) + len(before) > limit


def test_a_span_is_halved() -> None:
    assert Span(3, 8).halves() == (Span(3, 5), Span(5, 8))


LINES = ["<d>", "a b", "c", " ", "d e f", "<d>", "g", "h " * 30, "i"]


def test_spans_separate_documents_and_long_lines() -> None:
    segmented = SegmentedLines(LINES, 10, words, together=True, marks=True)
    texts = [[segmented.pieces[i].text for i in range(s.first, s.end)] for s in segmented.spans]
    assert texts[:3] == [["a b", "c"], ["d e f"], ["g"]]
    assert texts[-1] == ["i"]
    assert segmented.long == [7]
    assert texts[3:-1] == [["h " * 9 + "h"]] * 3


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("marks", [True, False])
def test_translations_are_put_in_their_places(together: bool, marks: bool) -> None:
    segmented = SegmentedLines(LINES, 10, words, together=together, marks=marks)
    for span in segmented.spans:
        segmented.fill(
            span, [segmented.pieces[i].text.upper() for i in range(span.first, span.end)]
        )
    mark = "<d>" if marks else "<D>"
    expected = [mark if line == "<d>" else line.strip().upper() for line in LINES]
    assert segmented.translations() == expected


def test_translations_that_do_not_fit_a_span() -> None:
    segmented = SegmentedLines(["a", "b", "b"], 10, characters, together=True, marks=True)
    (span,) = segmented.spans
    assert segmented.fits(span, ["A", "B", "B"])
    assert segmented.fits(span, ["A", "B", "C"])
    assert not segmented.fits(span, ["A", "B"])
    assert not segmented.fits(span, ["A", "B", " "])
    assert not segmented.fits(span, ["A", "A", "A"])
