"""Batches with a token budget, identical for every number of processes.

Examples are grouped by length into a few buckets, so that batches have little padding and few
different shapes. The examples of each batch and the order of the batches depend only on the seed
and the epoch. A batch is global: with R ranks, rank r takes its examples r, r + R, r + 2R, ... A
position in the data is (epoch, index of the next batch).
"""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, log2

import numpy as np
import torch
from torch import Tensor

from reluformer.data.corpus import Corpus, Int64s, Side
from reluformer.data.tokenizer import BOS, EOS, PAD
from reluformer.errors import UserError

# Rows per batch are a multiple of this if the budget allows: it suits hardware and rank counts.
_ROWS_MULTIPLE = 8

_TENSOR_FIELDS = ("source", "source_lengths", "target_in", "target_out", "target_lengths")

Position = tuple[int, int]
"""Epoch and index of the next batch."""


@dataclass(frozen=True)
class Batch:
    """The part of a global batch that one rank computes, as int64 tensors padded with `pad`.

    There may be fewer examples than rows. A row without an example has the source eos and the
    target length 0.
    """

    source: Tensor
    """Source ids, each row ending with eos, [B, S]."""
    source_lengths: Tensor
    """Lengths without padding, [B]."""
    target_in: Tensor
    """Decoder input, each row starting with bos, [B, T]."""
    target_out: Tensor
    """Decoder output, each row ending with eos, [B, T]."""
    target_lengths: Tensor
    """Lengths without padding, [B]."""
    examples: Int64s
    """Indices of the examples in the first rows, [at most B]."""
    target_tokens: int
    """Target tokens of the global batch. Losses divided by it do not depend on the world size."""
    position: Position
    """Position after this batch."""

    def to(self, device: torch.device | str) -> "Batch":
        """Copy to `device`; copies from pinned memory do not block."""
        return self.with_tensors([t.to(device, non_blocking=True) for t in self.tensors()])

    def pin(self) -> "Batch":
        """Copy to page-locked memory."""
        return self.with_tensors([tensor.pin_memory() for tensor in self.tensors()])

    def tensors(self) -> list[Tensor]:
        """The five tensors, in the order of their fields."""
        return [getattr(self, name) for name in _TENSOR_FIELDS]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Batch":
        """A copy with other tensors, in the order of `tensors()`."""
        return replace(self, **dict(zip(_TENSOR_FIELDS, tensors, strict=True)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class BatchPlan:
    """The global batches of one epoch.

    Batch i is `order[bounds[i, 0] : bounds[i, 1]]`, examples of the bucket `buckets[i]`.
    """

    epoch: int
    order: Int64s
    bounds: Int64s
    buckets: Int64s

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.bounds)

    def __getitem__(self, index: int) -> Int64s:
        """Indices of the examples of batch `index`, in order."""
        first, end = self.bounds[index]
        return self.order[first:end]


class Batches:
    """Batches of the examples of a corpus. All methods are deterministic and have no state."""

    def __init__(
        self,
        corpus: Corpus,
        spans: Int64s,
        *,
        batch_tokens: int,
        seed: int,
        fixed_shapes: bool = False,
        buckets: Sequence[int] | None = None,
    ) -> None:
        """Group examples into batches.

        Args:
            corpus: Encoded sentences.
            spans: First and last + 1 sentence of each example, [n, 2].
            batch_tokens: Most ids of a batch on either side, padding included.
            seed: Seed of the order.
            fixed_shapes: Give all batches of a bucket the same shape; the last one may have rows
                without an example. Otherwise batches are trimmed to their longest example.
            buckets: Lengths to pad to; default: `ladder` of the longest example.
        """
        if not len(spans):
            raise UserError("there are no examples to form batches of")
        self.corpus, self.spans = corpus, spans
        self.seed, self.fixed_shapes = seed, fixed_shapes
        self.source_lengths = corpus.source.lengths(spans)
        self.target_lengths = corpus.target.lengths(spans)
        lengths = np.maximum(self.source_lengths, self.target_lengths)
        longest = int(lengths.max())
        self.buckets = np.array(sorted(buckets) if buckets else ladder(longest), dtype=np.int64)
        if self.buckets[-1] < longest:
            raise UserError(f"the longest bucket is {self.buckets[-1]}, an example has {longest}")
        if self.buckets[-1] > batch_tokens:
            raise UserError(
                f"batch_tokens must be at least {self.buckets[-1]}, the padded length of the "
                f"longest example, got {batch_tokens}"
            )
        self._bucket = np.searchsorted(self.buckets, lengths)
        fitting = batch_tokens // self.buckets
        whole = fitting // _ROWS_MULTIPLE * _ROWS_MULTIPLE
        # Rows of a full batch, by bucket.
        self.rows = np.where(whole > 0, whole, fitting)

    def plan(self, epoch: int) -> BatchPlan:
        """Batches of one epoch: every example once, in an order given by the seed and the epoch."""
        # NumPy guarantees the raw bits of a named generator for all future versions.
        bits = np.random.PCG64(np.random.SeedSequence((self.seed, epoch)))
        order = np.lexsort((bits.random_raw(len(self.spans)), self._bucket))
        ends = np.cumsum(np.bincount(self._bucket, minlength=len(self.buckets)))
        first = [
            np.arange(start, end, rows)
            for start, end, rows in zip([0, *ends[:-1]], ends, self.rows, strict=True)
        ]
        buckets = np.repeat(np.arange(len(self.buckets)), [len(starts) for starts in first])
        starts = np.concatenate(first)
        bounds = np.stack([starts, np.minimum(starts + self.rows[buckets], ends[buckets])], axis=1)
        shuffle = np.argsort(bits.random_raw(len(starts)), kind="stable")
        return BatchPlan(epoch, order, bounds[shuffle], buckets[shuffle])

    def epoch(
        self, epoch: int, first: int = 0, *, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """Yield the batches of one epoch from index `first`, as rank `rank` of `world`."""
        plan = self.plan(epoch)
        for index in range(first, len(plan)):
            yield self.batch(plan, index, rank=rank, world=world)

    def endless(
        self, position: Position = (0, 0), *, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """Yield batches without end, epoch after epoch, starting at `position`."""
        first = position[1]
        for epoch in count(position[0]):
            yield from self.epoch(epoch, first, rank=rank, world=world)
            first = 0

    def batch(self, plan: BatchPlan, index: int, *, rank: int = 0, world: int = 1) -> Batch:
        """Batch `index` of a plan of this object, as rank `rank` of `world`."""
        members = plan[index]
        # Shapes come from the global batch, so that they are equal on all ranks.
        if self.fixed_shapes:
            bucket = plan.buckets[index]
            rows, widths = self.rows[bucket], [int(self.buckets[bucket])] * 2
        else:
            sides = (self.source_lengths, self.target_lengths)
            rows, widths = len(members), [int(lengths[members].max()) for lengths in sides]
        rows = -(-int(rows) // world)
        local = members[rank::world]
        spans = self.spans[local]
        source, source_lengths = _gather(self.corpus.source, spans, rows, widths[0])
        source[len(local) :, 0], source_lengths[len(local) :] = EOS, 1
        target_out, target_lengths = _gather(self.corpus.target, spans, rows, widths[1])
        target_in = np.full_like(target_out, PAD)
        target_in[: len(local), 0] = BOS
        # Shifted right by one, without the end token.
        inside = np.arange(1, widths[1]) < target_lengths[:, None]
        target_in[:, 1:][inside] = target_out[:, :-1][inside]
        return Batch(
            torch.from_numpy(source),
            torch.from_numpy(source_lengths),
            torch.from_numpy(target_in),
            torch.from_numpy(target_out),
            torch.from_numpy(target_lengths),
            examples=local,
            target_tokens=int(self.target_lengths[members].sum()),
            position=(plan.epoch, index + 1) if index + 1 < len(plan) else (plan.epoch + 1, 0),
        )


def ladder(longest: int, *, per_octave: int = 4, multiple: int = 8) -> list[int]:
    """Bucket lengths up to `longest`, `per_octave` for each doubling, multiples of `multiple`.

    `ladder(100)` is [8, 16, 24, 32, 40, 48, 56, 64, 80, 88, 104].
    """
    top = ceil(longest / multiple)
    rungs = {round(2 ** (step / per_octave)) for step in range(ceil(log2(top) * per_octave))}
    return [rung * multiple for rung in sorted({rung for rung in rungs if rung < top} | {top})]


def pad_sources(sources: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Append eos to source ids and pad them: ids [B, S] and lengths [B]."""
    lengths = [len(ids) + 1 for ids in sources]
    padded = torch.full((len(sources), max(lengths, default=0)), PAD)
    for row, ids in enumerate(sources):
        padded[row, : lengths[row]] = torch.tensor([*ids, EOS])
    return padded, torch.tensor(lengths)


def prefetch(batches: Iterable[Batch], *, depth: int = 4, pin: bool = False) -> Iterator[Batch]:
    """Yield `batches` in order while a thread prepares (and pins) up to `depth` batches ahead.

    Every batch has its own position, so reading ahead does not affect resumption.
    """
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for batch in batches:
                put(batch.pin() if pin else batch)
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()


def _gather(side: Side, spans: Int64s, rows: int, width: int) -> tuple[Int64s, Int64s]:
    """Ids of `spans` [n, 2], each ending with eos, padded to [rows, width], and lengths [rows]."""
    filled = len(spans)
    lengths = np.zeros(rows, dtype=np.int64)
    lengths[:filled] = side.lengths(spans)
    inside = np.arange(width) < lengths[:, None]
    # Tokens of row r are consecutive, and boolean indexing visits the rows in order.
    columns = np.broadcast_to(np.arange(width), inside.shape)[inside]
    starts = np.repeat(side.offsets[spans[:, 0]], lengths[:filled])
    ids = np.full((rows, width), PAD, dtype=np.int64)
    ids[inside] = side.tokens[starts + columns]
    ids[np.arange(filled), lengths[:filled] - 1] = EOS
    return ids, lengths
