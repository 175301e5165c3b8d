"""Batches: every example once per epoch, within the budget, equal for every world size."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reluformer.data import packing
from reluformer.data.batches import Batch, Batches, ladder, pad_sources, prefetch
from reluformer.data.corpus import Corpus
from reluformer.data.synthetic import sample
from reluformer.data.tokenizer import BOS, EOS, PAD, Tokenizer
from reluformer.errors import UserError


@pytest.fixture(scope="session")
def corpus(tokenizer: Tokenizer) -> Corpus:
    return Corpus.in_memory(sample.documents(9, 150), tokenizer)


def batches(corpus: Corpus, limit: int = 60, **options: object) -> Batches:
    spans = packing.pack_sentences(corpus, limit).spans
    return Batches(corpus, spans, **{"batch_tokens": 700, "seed": 3, **options})  # type: ignore[arg-type]


@given(
    limit=st.integers(40, 200),
    budget=st.integers(400, 3000),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
    fixed=st.booleans(),
)
def test_every_example_once_within_the_budget(
    corpus: Corpus, limit: int, budget: int, seed: int, epoch: int, fixed: bool
) -> None:
    made = batches(corpus, limit, batch_tokens=budget, seed=seed, fixed_shapes=fixed)
    plan = made.plan(epoch)
    everything = np.concatenate([plan[index] for index in range(len(plan))])
    assert np.array_equal(np.sort(everything), np.arange(len(made.spans)))
    for index, batch in enumerate(made.epoch(epoch)):
        assert batch.source.numel() <= budget and batch.target_in.numel() <= budget
        assert np.array_equal(batch.examples, plan[index])


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("world", [2, 3, 7])
def test_ranks_share_the_same_global_batches(corpus: Corpus, world: int, fixed: bool) -> None:
    made = batches(corpus, fixed_shapes=fixed)
    ranks = [list(made.epoch(1, rank=rank, world=world)) for rank in range(world)]
    for index, whole in enumerate(made.epoch(1)):
        parts = [rank[index] for rank in ranks]
        assert len({part.source.shape for part in parts}) == 1
        assert len({part.target_in.shape for part in parts}) == 1
        assert parts[0].source.shape[1] == whole.source.shape[1]
        assert {part.target_tokens for part in parts} == {whole.target_tokens}
        assert {part.position for part in parts} == {whole.position}
        united = {}
        for part in parts:
            for row, example in enumerate(part.examples.tolist()):
                united[example] = [part.source[row], part.target_in[row], part.target_out[row]]
        assert sorted(united) == sorted(whole.examples.tolist())
        for row, example in enumerate(whole.examples.tolist()):
            expected = [whole.source[row], whole.target_in[row], whole.target_out[row]]
            assert all(map(torch.equal, united[example], expected))
        tokens = sum(int(part.target_lengths.sum()) for part in parts)
        assert tokens == whole.target_tokens == int(whole.target_lengths.sum())


def test_rows_hold_the_ids_of_their_spans(corpus: Corpus, tokenizer: Tokenizer) -> None:
    made = batches(corpus)
    for batch in made.epoch(0):
        for row, example in enumerate(batch.examples.tolist()):
            first, end = made.spans[example]
            source, target = (
                [i for s in range(first, end) for i in (*side.sentence(s), tokenizer.sep)][:-1]
                for side in (corpus.source, corpus.target)
            )
            for ids, lengths, expected in [
                (batch.source, batch.source_lengths, [*source, EOS]),
                (batch.target_in, batch.target_lengths, [BOS, *target]),
                (batch.target_out, batch.target_lengths, [*target, EOS]),
            ]:
                assert ids[row, : lengths[row]].tolist() == expected
                assert (ids[row, lengths[row] :] == PAD).all()
                assert ids.dtype == lengths.dtype == torch.int64


def test_padded_sources_equal_those_of_training(corpus: Corpus, tokenizer: Tokenizer) -> None:
    batch = next(batches(corpus).epoch(0))
    made = batches(corpus)
    ids = []
    for first, end in made.spans[batch.examples]:
        sentences = [tokenizer.decode(corpus.source.sentence(s)) for s in range(first, end)]
        ids.append(tokenizer.encode_document(sentences))
    source, lengths = pad_sources(ids)
    assert torch.equal(source, batch.source) and torch.equal(lengths, batch.source_lengths)


def test_fixed_shapes_give_one_shape_per_bucket(corpus: Corpus) -> None:
    made = batches(corpus, fixed_shapes=True)
    shapes = {batch.source.shape for epoch in range(3) for batch in made.epoch(epoch)}
    assert len(shapes) == len({int(bucket) for bucket in made.plan(0).buckets})
    assert {shape[1] for shape in shapes} <= set(made.buckets.tolist())


def test_rows_without_an_example_are_empty(corpus: Corpus) -> None:
    made = Batches(corpus, packing.pack_sentences(corpus, 60).spans[:1], batch_tokens=700, seed=0)
    empty = next(made.epoch(0, rank=1, world=2))
    assert len(empty.examples) == 0 and empty.source.shape[0] == 1
    assert empty.source[0, 0] == EOS and empty.source_lengths.tolist() == [1]
    assert empty.target_lengths.tolist() == [0]
    assert (empty.target_out == PAD).all() and (empty.target_in == PAD).all()
    assert empty.target_tokens > 0


def test_resuming_continues_exactly(corpus: Corpus) -> None:
    made = batches(corpus)
    endless = made.endless()
    run = [next(endless) for _ in range(2 * len(made.plan(0)) + 3)]
    assert run[len(made.plan(0)) - 1].position == (1, 0)
    for stop in (0, 4, len(made.plan(0)) - 1, len(made.plan(0)) + 1):
        resumed = batches(corpus).endless(run[stop].position)
        for expected in run[stop + 1 :]:
            batch = next(resumed)
            assert torch.equal(batch.source, expected.source)
            assert torch.equal(batch.target_out, expected.target_out)
            assert batch.position == expected.position


def test_the_order_depends_only_on_seed_and_epoch(corpus: Corpus) -> None:
    first, again = batches(corpus).plan(0), batches(corpus).plan(0)
    assert np.array_equal(first.order, again.order) and np.array_equal(first.bounds, again.bounds)
    assert not np.array_equal(first.order, batches(corpus).plan(1).order)
    assert not np.array_equal(first.order, batches(corpus, seed=4).plan(0).order)


def test_the_plan_equals_a_recorded_one(tokenizer: Tokenizer) -> None:
    # A run resumed under another version of the libraries must see the same batches.
    pairs = [[("a b c", "d")]] * 6 + [[("a " * 30, "b")]] * 3
    corpus = Corpus.in_memory(pairs, tokenizer)
    spans = packing.single_sentences(corpus, 100).spans
    plan = Batches(corpus, spans, batch_tokens=32, seed=11, buckets=[8, 32]).plan(2)
    members = [plan[index].tolist() for index in range(len(plan))]
    assert members == [[7], [6], [5, 3, 1, 2], [8], [0, 4]]


@pytest.mark.parametrize("longest", [1, 7, 8, 9, 100, 1000, 2048])
def test_ladder(longest: int) -> None:
    rungs = ladder(longest)
    assert rungs == sorted(set(rungs)) and all(rung % 8 == 0 for rung in rungs)
    assert longest <= rungs[-1] < longest + 8
    # No rung is more than half again as long as the one before, beyond the shortest.
    assert all(high <= 1.6 * low for low, high in zip(rungs[1:], rungs[2:], strict=False))
    assert ladder(100) == [8, 16, 24, 32, 40, 48, 56, 64, 80, 88, 104]


def test_invalid_arguments_are_refused(corpus: Corpus) -> None:
    with pytest.raises(UserError, match="no example"):
        Batches(corpus, np.empty((0, 2), dtype=np.int64), batch_tokens=10, seed=0)
    with pytest.raises(UserError, match="batch_tokens must be at least 64, .*, got 20"):
        batches(corpus, batch_tokens=20)
    with pytest.raises(UserError, match="the longest bucket is 16, an example has"):
        batches(corpus, buckets=[8, 16])


def test_prefetching_yields_the_same_batches(corpus: Corpus) -> None:
    made = batches(corpus)
    fetched = list(prefetch(made.epoch(0), depth=2))
    for batch, expected in zip(fetched, made.epoch(0), strict=True):
        assert torch.equal(batch.source, expected.source) and batch.position == expected.position


def test_prefetching_propagates_errors_and_stops_its_thread(corpus: Corpus) -> None:
    def broken() -> Iterator[Batch]:
        yield next(batches(corpus).epoch(0))
        raise OSError("the disk went away")

    stream = prefetch(broken())
    next(stream)
    with pytest.raises(OSError, match="the disk went away"):
        next(stream)
    running = prefetch(batches(corpus).endless(), depth=1)
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_moving_a_batch_keeps_its_other_fields(corpus: Corpus) -> None:
    batch = next(batches(corpus).epoch(0))
    moved = batch.to("cpu")
    assert torch.equal(moved.target_in, batch.target_in)
    assert moved.position == batch.position and moved.examples is batch.examples


def test_collating_is_fast(corpus: Corpus) -> None:
    made = batches(corpus, limit=200, batch_tokens=8000)
    start, tokens = time.perf_counter(), 0
    for epoch in range(5):
        for batch in made.epoch(epoch):
            tokens += int(batch.source_lengths.sum() + batch.target_lengths.sum())
    # About ten million a second when the machine is idle.
    assert tokens / (time.perf_counter() - start) > 300_000
