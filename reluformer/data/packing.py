"""Cutting a corpus into training examples: spans of consecutive sentences.

A span [first, end) counts in sentences. Its length on a side is its ids with separators between
sentences and one end mark (or, for the decoder's input, one start mark); its length is the larger
of both sides.
"""

from dataclasses import dataclass

import numpy as np

from reluformer.data.corpus import Corpus, Int64s
from reluformer.errors import UserError


@dataclass(frozen=True)
class Packing:
    """Examples of a corpus.

    `spans` [examples, 2] are half-open and in order. `oversized` are the sentences longer than the
    limit, which stand alone in their span; `excluded` those longer than the hard cap, which are in
    no span. Every other sentence is in exactly one.
    """

    spans: Int64s
    oversized: Int64s
    excluded: Int64s

    def describe(self) -> str:
        """One line for logs: how many examples, and what did not fit."""
        text = f"{len(self.spans)} examples"
        if len(self.oversized):
            text += f", {len(self.oversized)} of one sentence beyond the limit"
        if len(self.excluded):
            text += f", {len(self.excluded)} sentences excluded beyond the cap"
        return text


def pack(
    corpus: Corpus, limit: int, *, cap: int | None = None, cross_documents: bool = False
) -> Packing:
    """Join as many consecutive sentences as fit into `limit` ids on either side.

    Spans end with their document unless `cross_documents`. A single sentence longer than `limit`
    stays alone up to `cap` ids (default: twice the limit) and is excluded beyond.
    """
    cap = 2 * limit if cap is None else cap
    if not 2 <= limit <= cap:
        raise UserError(f"limit is {limit} and cap is {cap}, allowed is 2 <= limit <= cap")
    count = len(corpus)
    if cross_documents:
        ends = np.full(count, count, dtype=np.int64)
    else:
        ends = np.repeat(corpus.documents[1:], np.diff(corpus.documents))
    for side in (corpus.source, corpus.target):
        offsets = np.asarray(side.offsets)
        # The last sentence that still fits when starting at each sentence.
        fits = np.searchsorted(offsets, offsets[:-1] + limit, side="right") - 1
        ends = np.minimum(ends, fits)
    alone = ends <= np.arange(count)
    ends[alone] += 1
    return _packing(corpus, _chain(ends), limit, cap)


def sentences(corpus: Corpus, cap: int) -> Packing:
    """Every sentence on its own; those longer than `cap` ids are excluded."""
    first = np.arange(len(corpus), dtype=np.int64)
    return _packing(corpus, np.stack([first, first + 1], axis=1), cap, cap)


def _chain(ends: Int64s) -> Int64s:
    # Follows the greedy choice from the first sentence to the last.
    jumps, first, spans = ends.tolist(), 0, []
    while first < len(jumps):
        spans.append((first, jumps[first]))
        first = jumps[first]
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


def _packing(corpus: Corpus, spans: Int64s, limit: int, cap: int) -> Packing:
    lengths = np.maximum(corpus.source.lengths(spans), corpus.target.lengths(spans))
    oversized = (lengths > limit) & (lengths <= cap)
    excluded = lengths > cap
    return Packing(spans[~excluded], spans[oversized, 0], spans[excluded, 0])
