"""Length limits, banned tokens and errors, for all searches."""

import pytest
import torch

from reluformer.errors import UserError
from reluformer.translation.search import SearchConfig, Task, beam_search, greedy, sample, search
from tests.translation.search.oracle import tiny_model

METHODS = [SearchConfig(beam=1), SearchConfig(beam=4), SearchConfig(method="sample")]


def run(model, task: Task, config: SearchConfig):
    if config.method == "sample":
        return sample(model, task, config)
    if config.beam == 1:
        return greedy(model, task, config)
    return [found[0] for found in beam_search(model, task, config)]


@pytest.mark.parametrize("config", METHODS, ids=["greedy", "beam", "sample"])
def test_lengths_can_be_forced_for_each_sentence(config: SearchConfig) -> None:
    model = tiny_model(vocabulary=12)
    lengths = [0, 7, 3, 3, 12]
    task = Task([[3, 4]] * 5, lengths, lengths, keys=range(5))
    found = run(model, task, config)
    assert [len(h.tokens) for h in found] == lengths
    assert not any(h.complete for h in found)


@pytest.mark.parametrize("config", METHODS, ids=["greedy", "beam", "sample"])
def test_special_and_banned_tokens_do_not_occur(config: SearchConfig) -> None:
    model = tiny_model(vocabulary=9)
    found = search(model, [[3, 4], [5], []] * 5, config, banned=(3, 6))
    assert all(set(h.tokens) <= {4, 5, 7, 8} and h.tokens for h in found)


@pytest.mark.parametrize("config", METHODS, ids=["greedy", "beam", "sample"])
def test_translations_have_at_most_the_maximum_length(config: SearchConfig) -> None:
    model = tiny_model(vocabulary=9)
    # Give the end mark the logit 0 and everything else a large one: it never comes by itself.
    with torch.no_grad():
        model.decoder_norm.weight.zero_()
        model.decoder_norm.bias.fill_(1.0)
        model.target_embedding.weight.fill_(1.0)
        model.target_embedding.weight[2] = -1.0
    for source, found in zip([[3] * 4, [5]], search(model, [[3] * 4, [5]], config), strict=True):
        assert len(found.tokens) == 2 * len(source) + 20
        assert not found.complete


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(UserError, match="model.eval"):
        search(tiny_model().train(), [[3, 4]])


def test_half_precision() -> None:
    model = tiny_model().bfloat16()
    for config in METHODS:
        assert search(model, [[3, 4], [5]], config)[0].tokens


def test_nothing_to_translate() -> None:
    assert search(tiny_model(), []) == []


@pytest.mark.parametrize("config", METHODS, ids=["greedy", "beam", "sample"])
def test_damaged_weights_are_reported(config: SearchConfig) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.decoder_norm.weight[0] = torch.nan
    with pytest.raises(UserError, match="damaged"):
        search(model, [[3, 4]], config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "best"),
        ("beam", 0),
        ("length_penalty", float("nan")),
        ("max_ratio", -1.0),
        ("max_extra", 0),
        ("temperature", 0.0),
        ("top_k", 0),
        ("top_p", 1.5),
        ("seed", -1),
    ],
)
def test_invalid_settings_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UserError, match=field):
        SearchConfig(**{field: value})
