"""Training examples of a corpus: spans of consecutive sentences.

A span [first, end) counts sentences. Its length on one side is its number of ids with separators
between sentences and one end token (or, for the decoder input, one start token). Its length is the
larger of both sides.
"""

from dataclasses import dataclass

import numpy as np

from reluformer.data.corpus import Corpus, Int64s
from reluformer.errors import UserError

_SHORTEST_LIMIT = 16


@dataclass(frozen=True)
class ExampleSpans:
    """Training examples of a corpus. Every sentence that is not excluded is in exactly one span."""

    spans: Int64s
    """First and last + 1 sentence of each example, in order, [examples, 2]."""
    oversized: Int64s
    """Sentences longer than the limit, each an example of its own."""
    excluded: Int64s
    """Sentences longer than the cap, in no example."""

    def describe(self) -> str:
        """One line for logs: number of examples, oversized and excluded sentences."""
        text = f"{len(self.spans):,} examples"
        if len(self.oversized):
            text += f", {len(self.oversized):,} of them one sentence beyond the limit"
        if len(self.excluded):
            text += f"; sentences left out because they are too long: {len(self.excluded):,}"
        return text


def pack_sentences(
    corpus: Corpus,
    limit: int,
    *,
    cap: int | None = None,
    cross_documents: bool = False,
    limits: Int64s | None = None,
) -> ExampleSpans:
    """Pack consecutive sentences greedily into examples of at most `limit` ids on either side.

    Args:
        corpus: Encoded sentences.
        limit: Most ids of an example.
        cap: Most ids of a sentence. A sentence between `limit` and `cap` is an example of its own;
            longer ones are excluded. Default: twice the limit.
        cross_documents: Let examples extend across the borders of documents.
        limits: Lower limits, one for each document, [documents]. A sentence longer than its
            document's limit is an example of its own.
    """
    cap = 2 * limit if cap is None else cap
    if not 2 <= limit <= cap:
        raise UserError(f"limit and cap must satisfy 2 <= limit <= cap, got {limit} and {cap}")
    count = len(corpus)
    # The limit of the document of each sentence.
    longest: int | Int64s = limit
    if limits is not None:
        longest = np.repeat(np.minimum(limits, limit), np.diff(corpus.documents))
    if cross_documents:
        ends = np.full(count, count, dtype=np.int64)
    else:
        ends = np.repeat(corpus.documents[1:], np.diff(corpus.documents))
    for side in (corpus.source, corpus.target):
        offsets = np.asarray(side.offsets)
        # End of the longest span that fits, for each first sentence.
        fits = np.searchsorted(offsets, offsets[:-1] + longest, side="right") - 1
        ends = np.minimum(ends, fits)
    alone = ends <= np.arange(count)
    ends[alone] += 1
    return _example_spans(corpus, _chain(ends), limit, cap)


def mixed_limits(documents: int, longest: int) -> Int64s:
    """Random limits of documents for `pack_sentences`, the same in every call, [documents].

    Their logarithms are uniform, from fewer ids than most sentences have to `longest`.
    """
    logarithms = np.random.default_rng(0).uniform(
        np.log(min(_SHORTEST_LIMIT, longest)), np.log(longest), documents
    )
    return np.exp(logarithms).round().astype(np.int64)


def single_sentences(corpus: Corpus, cap: int) -> ExampleSpans:
    """Every sentence as an example of its own; sentences longer than `cap` ids are excluded."""
    first = np.arange(len(corpus), dtype=np.int64)
    return _example_spans(corpus, np.stack([first, first + 1], axis=1), cap, cap)


def _chain(ends: Int64s) -> Int64s:
    """Consecutive spans from the first sentence; `ends` [n] is the end of a span by its start."""
    end_of, first, spans = ends.tolist(), 0, []
    while first < len(end_of):
        spans.append((first, end_of[first]))
        first = end_of[first]
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


def _example_spans(corpus: Corpus, spans: Int64s, limit: int, cap: int) -> ExampleSpans:
    lengths = np.maximum(corpus.source.lengths(spans), corpus.target.lengths(spans))
    oversized = (lengths > limit) & (lengths <= cap)
    excluded = lengths > cap
    return ExampleSpans(spans[~excluded], spans[oversized, 0], spans[excluded, 0])
