"""Greedy search and sampling."""

import pytest
import torch

from reluformer.model.sampling import draw
from reluformer.translation.search import SearchConfig, Task, greedy, search
from tests.translation.search.oracle import log_probabilities, log_probability, tiny_model

SOURCES = [[3, 4, 5], [7], [6, 5, 4, 3, 7, 7], []]


def test_greedy_search_appends_the_most_likely_token() -> None:
    model = tiny_model(vocabulary=12)
    config = SearchConfig(beam=1, max_ratio=1, max_extra=6)
    for source, found in zip(SOURCES, greedy(model, Task.of(SOURCES, config), config), strict=True):
        tokens: list[int] = []
        while len(tokens) < config.longest(len(source)):
            following = log_probabilities(model, source, tokens)[-1]
            following[[0, 1]] = -torch.inf
            if not tokens:
                following[2] = -torch.inf
            if int(following.argmax()) == 2:
                break
            tokens.append(int(following.argmax()))
        assert found.tokens == tokens
        assert found.complete == (len(tokens) < config.longest(len(source)))
        wanted = log_probability(model, source, tokens)
        assert found.log_probability == pytest.approx(wanted, abs=1e-4)


def grid(logits: list[float], config: SearchConfig, size: int = 100_000) -> torch.Tensor:
    """Frequency of each token for evenly spaced numbers in [0, 1)."""
    numbers = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    table = torch.tensor([logits]).expand(size, -1)
    return draw(table, numbers, config).bincount(minlength=len(logits)) / size


def test_tokens_are_sampled_with_their_probabilities() -> None:
    logits = [0.3, -torch.inf, 2.0, -1.0, 0.3, 1.0]
    for temperature in (0.5, 1.0, 3.0):
        shares = grid(logits, SearchConfig(temperature=temperature))
        wanted = (torch.tensor(logits) / temperature).softmax(-1)
        torch.testing.assert_close(shares, wanted, atol=1e-4, rtol=0)


def test_top_k_keeps_the_most_likely() -> None:
    shares = grid([0.0, 2.0, 1.0, -3.0], SearchConfig(top_k=2))
    wanted = torch.tensor([2.0, 1.0]).softmax(-1)
    torch.testing.assert_close(
        shares, torch.tensor([0, wanted[0], wanted[1], 0]), atol=1e-4, rtol=0
    )


def test_top_p_keeps_the_smallest_set_that_reaches_the_sum() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert grid(logits, SearchConfig(top_p=0.4)).tolist() == [1, 0, 0, 0]
    two = grid(logits, SearchConfig(top_p=0.6))
    torch.testing.assert_close(two, torch.tensor([0.625, 0.375, 0, 0]), atol=1e-4, rtol=0)
    assert (grid(logits, SearchConfig(top_p=0.999)) > 0).all()


def test_a_number_on_the_last_edge_gives_a_kept_token() -> None:
    table = torch.tensor([[0.0, -torch.inf, 0.0]])
    almost_one = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert draw(table, almost_one, SearchConfig()).item() in (0, 2)


def test_samples_depend_only_on_seed_and_key() -> None:
    model = tiny_model(vocabulary=30)
    config = SearchConfig(method="sample", max_extra=10, seed=5)
    together = search(model, SOURCES, config)
    backwards = search(model, SOURCES[::-1], config, keys=[3, 2, 1, 0])[::-1]
    alone = [search(model, [s], config, keys=[i])[0] for i, s in enumerate(SOURCES)]
    for a, b, c in zip(together, backwards, alone, strict=True):
        assert a.tokens == b.tokens == c.tokens
    other = SearchConfig(method="sample", max_extra=10, seed=6)
    assert [h.tokens for h in search(model, SOURCES, other)] != [h.tokens for h in together]
    for source, found in zip(SOURCES, together, strict=True):
        wanted = log_probability(model, source, found.tokens)
        assert found.log_probability == pytest.approx(wanted, abs=1e-4)


def test_sampling_with_one_choice_is_greedy() -> None:
    model = tiny_model(vocabulary=30)
    one = search(model, SOURCES, SearchConfig(method="sample", top_k=1))
    assert [h.tokens for h in one] == [
        h.tokens for h in search(model, SOURCES, SearchConfig(beam=1))
    ]
