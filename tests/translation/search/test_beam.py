"""Beam search against exhaustive search, in other batches, and without early stopping."""

import random

import pytest
import torch

from reluformer import ATTENTIONS
from reluformer.translation.search import SearchConfig, Task, beam_search, greedy, search
from reluformer.translation.search.beam import _Beams
from tests.translation.search.oracle import exhaustive, log_probability, tiny_model

SOURCES = [[3, 4, 5, 6, 7], [7], [5, 5], [4, 3, 7, 6, 5, 4, 3, 7, 6, 5], [6, 3, 4]]


@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["relu", "softmax"])
def test_a_full_beam_equals_exhaustive_search(kind: str, length_penalty: float) -> None:
    model = tiny_model(kind, vocabulary=6, seed=3)
    config = SearchConfig(beam=3 + 9 + 27, length_penalty=length_penalty)
    task = Task([[3, 4], [5, 5, 4, 3]], shortest=[1, 0], longest=[3, 3], keys=[0, 1])
    for source, shortest, found in zip(
        task.sources, task.shortest, beam_search(model, task, config, best=4), strict=True
    ):
        wanted = exhaustive(model, list(source), shortest, 3, length_penalty)[:4]
        assert [h.tokens for h in found] == [tokens for _, tokens in wanted]
        scores = torch.tensor([h.score for h in found])
        torch.testing.assert_close(scores, torch.tensor([score for score, _ in wanted]))


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_scores_equal_the_forward_pass(beam: int) -> None:
    model = tiny_model()
    config = SearchConfig(beam=beam, length_penalty=0.7, max_extra=4, max_ratio=1)
    for source, found in zip(SOURCES, search(model, SOURCES, config), strict=True):
        wanted = log_probability(model, source, found.tokens)
        assert found.log_probability == pytest.approx(wanted, abs=1e-4)
        assert found.score == pytest.approx(wanted / (len(found.tokens) + 1) ** 0.7, abs=1e-4)


@pytest.mark.parametrize("kind", ["relu", "softmax", "sigmoid", "stick_breaking"])
def test_results_do_not_depend_on_the_batch_and_its_order(kind: str) -> None:
    model = tiny_model(kind, vocabulary=20, positions="rotary" if kind == "relu" else "sinusoidal")
    generator = random.Random(1)
    sources = [generator.choices(range(3, 20), k=generator.randint(1, 12)) for _ in range(40)]
    config = SearchConfig(beam=4, max_ratio=1, max_extra=5)
    together = search(model, sources, config)
    order = generator.sample(range(40), 40)
    permuted = search(model, [sources[i] for i in order], config)
    # Enough that finished sentences wait to be dropped.
    for i in range(40):
        (alone,) = search(model, [sources[i]], config)
        for other in (together[i], permuted[order.index(i)]):
            assert other.tokens == alone.tokens
            assert other.score == pytest.approx(alone.score, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_is_greedy(seed: int) -> None:
    model = tiny_model(seed=seed)
    config = SearchConfig(beam=1, max_extra=6)
    task = Task.of(SOURCES, config)
    for beam, single in zip(
        beam_search(model, task, config), greedy(model, task, config), strict=True
    ):
        assert beam[0].tokens == single.tokens
        assert beam[0].score == pytest.approx(single.score, abs=1e-5)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("best", [1, 2])
def test_early_stopping_does_not_change_results(
    length_penalty: float, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SearchConfig(beam=8, length_penalty=length_penalty, max_ratio=1, max_extra=4)
    steps = {"early": 0, "never": 0}

    def run(name: str) -> list[list[list[int]]]:
        take = _Beams.step

        def counted(self: _Beams) -> None:
            steps[name] += len(self.decoder)
            take(self)

        found = []
        with monkeypatch.context() as patch:
            patch.setattr(_Beams, "step", counted)
            if name == "never":
                # Only a beam without any open hypothesis ends.
                patch.setattr(_Beams, "_bound", lambda self, sums: sums * 1e-9)
            for seed in range(2):
                task = Task.of(SOURCES, config)
                model = tiny_model(seed=seed, ending=5.0)
                for hypotheses in beam_search(model, task, config, best):
                    found.append([h.tokens for h in hypotheses])
        return found

    assert run("early") == run("never")
    # With a positive penalty the beam is mostly full before the bound can fall so low.
    assert steps["early"] < steps["never"] or length_penalty > 0


def test_several_hypotheses_differ_and_are_sorted() -> None:
    model = tiny_model()
    config = SearchConfig(beam=5)
    for found in beam_search(model, Task.of(SOURCES, config), config, best=5):
        assert 1 <= len(found) <= 5
        assert len({tuple(h.tokens) for h in found}) == len(found)
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)


@pytest.mark.parametrize(
    ("kind", "memory"), [*((k, "relu") for k in ATTENTIONS), ("relu", "persistent")]
)
def test_scores_of_long_hypotheses_equal_the_forward_pass(kind: str, memory: str) -> None:
    """The hypotheses are so long that the cache drops tokens without descendants."""
    model = tiny_model(kind, vocabulary=12, memory=memory, decoder_layers=1).double()
    lengths = [40, 9, 36]
    task = Task([[3, 4, 5], [6], [7, 8, 9, 10, 11]], lengths, lengths, keys=range(3))
    found = beam_search(model, task, SearchConfig(beam=4))
    for source, (hypothesis,) in zip(task.sources, found, strict=True):
        wanted = log_probability(model, list(source), hypothesis.tokens)
        assert hypothesis.log_probability == pytest.approx(wanted, rel=1e-4)


def test_a_beam_wider_than_the_vocabulary() -> None:
    model = tiny_model(vocabulary=5)
    (found,) = search(model, [[3, 4]], SearchConfig(beam=50, max_extra=3))
    assert set(found.tokens) <= {3, 4}
