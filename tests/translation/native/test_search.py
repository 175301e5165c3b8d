"""The native library against the model in torch: tokens, scores, threads, batches."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from reluformer.errors import UserError
from reluformer.model import ReLUFormer
from reluformer.translation import search as torch_search
from reluformer.translation.native.model import NativeModel
from reluformer.translation.native.search import beam_search, search
from reluformer.translation.search import Hypothesis, SearchConfig, Task
from tests.translation.native.models import ATTENTIONS, SHAPES, random_model, random_sources

CONFIG = SearchConfig(beam=3, length_penalty=0.7, max_ratio=1, max_extra=8)


def check_equal(found: Sequence[Hypothesis], wanted: Sequence[Hypothesis]) -> None:
    assert [h.tokens for h in found] == [h.tokens for h in wanted]
    assert [h.complete for h in found] == [h.complete for h in wanted]
    for field in ("score", "log_probability"):
        values = [[getattr(h, field) for h in some] for some in (found, wanted)]
        assert values[0] == pytest.approx(values[1], abs=2e-4)


def compare(model: ReLUFormer, sources: list[list[int]], config: SearchConfig) -> None:
    found = search(NativeModel.of(model), sources, config, banned=(5, 7))
    check_equal(found, torch_search.search(model, sources, config, banned=(5, 7)))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_equals_torch(attention: str) -> None:
    sources = random_sources(5)
    model = random_model(attention)
    compare(model, sources, CONFIG)


@pytest.mark.parametrize("attention", ["default", "softmax"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_torch(shape: str, attention: str) -> None:
    compare(random_model(attention, **SHAPES[shape]), random_sources(5), CONFIG)


@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("beam", [1, 2, 7])
def test_beams_and_penalties_equal_torch(beam: int, length_penalty: float) -> None:
    model, native = random_model(seed=beam), None
    native = NativeModel.of(model)
    config = SearchConfig(beam=beam, length_penalty=length_penalty)
    sources = random_sources(9)
    lengths = [len(source) for source in sources]
    forced = Task(sources, lengths, lengths, keys=range(9))
    free = Task(sources, [0] * 9, [3 * n for n in lengths], keys=range(9), banned=(11,))
    for task in (forced, free):
        best = min(beam, 3)
        found = beam_search(native, task, config, best=best)
        wanted = torch_search.beam_search(model, task, config, best=best)
        for some, others in zip(found, wanted, strict=True):
            check_equal(some, others)


def test_a_beam_wider_than_the_vocabulary() -> None:
    compare(random_model(vocabulary=8), random_sources(3, vocabulary=8), SearchConfig(beam=12))


def test_caches_grow_past_a_block() -> None:
    model, sources = random_model(), random_sources(2, longest=90)
    lengths = [90, 70]
    task = Task(sources, lengths, lengths, keys=range(2))
    found = beam_search(NativeModel.of(model), task, CONFIG)
    wanted = torch_search.beam_search(model, task, CONFIG)
    check_equal([h[0] for h in found], [h[0] for h in wanted])


@pytest.fixture
def threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.usefixtures("threads")
def test_results_depend_neither_on_threads_nor_on_the_batch(precision: str) -> None:
    native = NativeModel.of(random_model(vocabulary=500), precision)
    sources = random_sources(9, vocabulary=500)
    together = search(native, sources, CONFIG)
    for count in (2, 3):
        torch.set_num_threads(count)
        assert search(native, sources, CONFIG) == together
    torch.set_num_threads(1)
    assert [search(native, [source], CONFIG)[0] for source in sources] == together


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize("attention", ["default", "softmax"])
def test_rounded_weights_give_nearly_the_same_scores(attention: str, precision: str) -> None:
    model, sources = random_model(attention, vocabulary=300, width=64), random_sources(6)
    native = NativeModel.of(model, precision)
    # One step, so that all models choose from the same prefix.
    config = SearchConfig(beam=1, max_ratio=0, max_extra=1)
    found, wanted = search(native, sources, config), torch_search.search(model, sources, config)
    agreeing = [
        abs(one.log_probability - other.log_probability)
        for one, other in zip(found, wanted, strict=True)
        if one.tokens == other.tokens
    ]
    assert len(agreeing) >= 4 and max(agreeing) < 0.15


def test_sampling_equals_torch() -> None:
    model, sources = random_model(), random_sources(7)
    config = SearchConfig(method="sample", seed=3, top_k=5, max_ratio=1, max_extra=5)
    check_equal(
        search(NativeModel.of(model), sources, config), torch_search.search(model, sources, config)
    )


def test_zeros_are_left_out_and_counted() -> None:
    model = random_model("paper")
    native = NativeModel.of(model)
    search(native, random_sources(3), CONFIG)
    skipped = native.skipped
    assert 0 < skipped.slots_read < skipped.slots
    assert 0 < skipped.values_read < skipped.values
    softmax = NativeModel.of(random_model("softmax", memory="softmax"))
    search(softmax, random_sources(3), CONFIG)
    assert softmax.skipped.slots_read == softmax.skipped.slots
    assert softmax.skipped.values_read == softmax.skipped.values


def test_no_sources() -> None:
    assert search(NativeModel.of(random_model()), []) == []


@pytest.mark.parametrize("token", [-1, 90])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(UserError, match=f"below vocabulary 90, got {token}"):
        search(NativeModel.of(random_model()), [[3, token]])


@pytest.mark.parametrize("method", ["beam", "sample"])
def test_damaged_weights_are_reported(method: str) -> None:
    model = random_model()
    with torch.no_grad():
        model.decoder[1].memory.memory.values.fill_(torch.nan)
    with pytest.raises(UserError, match="not finite"):
        search(NativeModel.of(model), [[3, 4]], SearchConfig(method=method))
    with pytest.raises(UserError, match="not finite"):
        NativeModel.of(model, "int8")
