"""Model configurations: validation and round trip."""

import json
from typing import Any

import numpy as np
import pytest

from reluformer.config.schema import build, to_dict
from reluformer.errors import UserError
from reluformer.model import AttentionConfig, ModelConfig

BAD: list[tuple[dict[str, Any], str]] = [
    ({"vocabulary": 0}, "vocabulary must be at least 1, got 0"),
    ({"heads": 3}, "heads must divide width 512, got 3"),
    ({"kv_heads": 3}, "kv_heads must divide heads 8, got 3"),
    ({"width": 24, "heads": 8, "positions": "rotary"}, "even head width, got 3"),
    ({"norm": "mid"}, "norm must be one of pre, post, got 'mid'"),
    ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ({"encoder_layers": -1}, "encoder_layers must be at least 0"),
    ({"memory": "rellu"}, "memory must be one of gelu, .*, got 'rellu'"),
    ({"attention": {"kind": "rellu"}}, "attention.kind must be one of assa, .*, got 'rellu'"),
    ({"attention": {"gamma_init": 0}}, "gamma_init must be greater than 0"),
    ({"attention": {"row_sum_init": -1}}, "row_sum_init must be greater than 0"),
    ({"attention": {"gamma": "row"}}, "attention.gamma must be one of fixed, model, layer, head"),
    ({"attention": {"options": {"sink": 1}}}, "options.sink is not an option of relu"),
    ({"cross_attention": {"dropout": "much"}}, "cross_attention.dropout must be a number"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_invalid_configurations_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(ModelConfig, {"vocabulary": 10, **values})


DIRECT: list[tuple[dict[str, Any], str]] = [
    ({"positions": "rope"}, "positions must be one of sinusoidal, rotary, got 'rope'"),
    ({"norm": "Pre"}, "norm must be one of pre, post, got 'Pre'"),
    ({"kv_heads": -2}, "kv_heads must be at least 1, got -2"),
    ({"width": 512.0}, "width must be a whole number, got 512.0"),
    ({"width": 10**20}, r"width must be between -2\^63 and 2\^63"),
    ({"pad_id": 10**9}, "pad_id must be below vocabulary 10, got 1000000000"),
    ({"eos_id": 10}, "eos_id must be below vocabulary 10, got 10"),
    ({"bos_id": -1}, "bos_id must be at least 0, got -1"),
    ({"dropout": float("nan")}, "dropout must be a finite number, got nan"),
    ({"tie_embeddings": "no"}, "tie_embeddings must be true or false, got 'no'"),
    ({"attention": "softmax"}, "attention must be a mapping of fields, got 'softmax'"),
    ({"attention": {"gamma": "token"}}, "attention.gamma must be one of fixed, model, layer"),
    ({"attention": {"options": {"gamma": "x"}}}, "options.gamma must be a number, got 'x'"),
    ({"attention": {"power": 10**5000}}, "attention.power must be between"),
    ({"memory": "top_k", "memory_options": {"k": "x"}}, "memory_options: k must be a whole"),
    ({"memory_options": {"value_std": "x"}}, "memory_options.value_std must be a number"),
]


@pytest.mark.parametrize(("values", "message"), DIRECT)
def test_the_constructor_checks_its_arguments(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig(vocabulary=10, **values)


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    config = ModelConfig(vocabulary=np.int64(10), dropout=np.float32(0.5))  # type: ignore[arg-type]
    assert json.dumps(to_dict(config))
    assert type(config.vocabulary) is int and type(config.dropout) is float


def test_configurations_survive_a_round_trip() -> None:
    config = ModelConfig(
        vocabulary=10,
        cross_attention=AttentionConfig("entmax", options={"alpha": 1.3}),
        memory="top_k",
        memory_options={"k": 4},
    )
    assert build(ModelConfig, to_dict(config)) == config


def test_a_site_without_an_attention_has_the_common_one() -> None:
    config = ModelConfig(vocabulary=10, cross_attention=AttentionConfig("softmax"))
    assert config.attention_at("cross").kind == "softmax"
    assert config.attention_at("encoder").kind == "relu"
