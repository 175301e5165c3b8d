"""Packing: every sentence once, in order, within the limit, greedily."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reluformer.data import packing
from reluformer.data.corpus import Corpus, Side
from reluformer.errors import UserError


def corpus_of(documents: list[list[tuple[int, int]]]) -> Corpus:
    """A corpus with sentences of the given numbers of ids."""
    lengths = np.array([pair for document in documents for pair in document]).reshape(-1, 2) + 1
    sides = []
    for column in (0, 1):
        offsets = np.concatenate([[0], np.cumsum(lengths[:, column])]).astype(np.int64)
        sides.append(Side(np.full(offsets[-1], 5, dtype=np.uint16), offsets))
    sizes = [len(document) for document in documents]
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Corpus(sides[0], sides[1], bounds, 10, "")


DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=8), max_size=6
)


@given(
    documents=DOCUMENTS,
    limit=st.integers(2, 30),
    extra=st.integers(0, 6),
    cross=st.booleans(),
)
def test_every_sentence_once_in_order_greedily(
    documents: list, limit: int, extra: int, cross: bool
) -> None:
    corpus = corpus_of(documents)
    cap = limit + extra
    packed = packing.pack_sentences(corpus, limit, cap=cap, cross_documents=cross)
    covered = [s for first, end in packed.spans.tolist() for s in range(first, end)]
    assert sorted([*covered, *packed.excluded.tolist()]) == list(range(len(corpus)))
    assert covered == sorted(covered)

    def length(first: int, end: int) -> int:
        span = np.array([[first, end]])
        return int(max(side.lengths(span)[0] for side in (corpus.source, corpus.target)))

    home = np.repeat(np.arange(len(documents)), np.diff(corpus.documents)).tolist()
    for first, end in packed.spans.tolist():
        assert first < end
        if end - first > 1:
            assert length(first, end) <= limit
        else:
            assert length(first, end) <= cap
            assert (length(first, end) > limit) == (first in packed.oversized)
        assert cross or home[first] == home[end - 1]
        # Greedy: the next sentence was left out because it did not fit.
        if end < len(corpus) and (cross or home[end] == home[first]):
            assert length(first, end + 1) > limit
    for sentence in packed.excluded.tolist():
        assert length(sentence, sentence + 1) > cap


def test_known_packing() -> None:
    corpus = corpus_of([[(3, 2), (3, 2), (1, 9)], [(1, 1), (30, 1), (1, 1)]])
    packed = packing.pack_sentences(corpus, 10, cap=20)
    assert packed.spans.tolist() == [[0, 2], [2, 3], [3, 4], [5, 6]]
    assert packed.excluded.tolist() == [4]
    assert packed.describe() == "4 examples; sentences left out because they are too long: 1"
    kept = packing.pack_sentences(corpus, 10, cap=31)
    assert kept.oversized.tolist() == [4] and not len(kept.excluded)
    assert kept.describe() == "5 examples, 1 of them one sentence beyond the limit"
    crossed = packing.pack_sentences(corpus, 13, cap=31, cross_documents=True)
    assert crossed.spans.tolist() == [[0, 2], [2, 4], [4, 5], [5, 6]]


def test_limits_of_documents_apply_to_their_own_sentences() -> None:
    corpus = corpus_of([[(3, 3), (3, 3), (3, 3)], [(3, 3), (3, 3), (9, 9)], [(3, 3), (3, 3)]])
    packed = packing.pack_sentences(corpus, 8, cap=12, limits=np.array([3, 8, 99]))
    assert packed.spans.tolist() == [[0, 1], [1, 2], [2, 3], [3, 5], [5, 6], [6, 8]]
    assert packed.oversized.tolist() == [5] and not len(packed.excluded)


def test_mixed_limits_are_spread_evenly_by_their_logarithm() -> None:
    limits = packing.mixed_limits(10_000, 512)
    assert limits.min() >= 16 and limits.max() <= 512
    shares = np.histogram(np.log2(limits), bins=5, range=(4, 9))[0] / len(limits)
    assert np.abs(shares - 0.2).max() < 0.02
    assert (limits == packing.mixed_limits(10_000, 512)).all()
    assert packing.mixed_limits(5, 8).tolist() == [8] * 5


def test_single_sentences() -> None:
    corpus = corpus_of([[(3, 2), (30, 2)], [(1, 9)]])
    packed = packing.single_sentences(corpus, 10)
    assert packed.spans.tolist() == [[0, 1], [2, 3]] and packed.excluded.tolist() == [1]


def test_invalid_limits_are_refused() -> None:
    with pytest.raises(UserError, match="2 <= limit <= cap, got 10 and 5"):
        packing.pack_sentences(corpus_of([]), 10, cap=5)
