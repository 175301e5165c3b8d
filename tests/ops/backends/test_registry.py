"""Which implementation runs: the fastest that can, or exactly the one that was asked for."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from reluformer import attention
from reluformer.errors import UserError
from reluformer.ops import api
from reluformer.ops.backends import reference, registry
from reluformer.ops.backends.registry import BACKENDS, Program
from reluformer.ops.call import AttentionResult, Call
from reluformer.ops.definition import Attention
from reluformer.ops.family.table import ATTENTIONS
from reluformer.ops.visibility import Visibility
from tests.ops.inputs import make


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts an implementation in front that refuses dropout; the list names the calls it ran."""
    ran: list[str] = []

    def run(attention: Attention, call: Call, options: Mapping[str, Any]) -> AttentionResult:
        ran.append(attention.name)
        return reference.run(attention, call, options)

    def why_not(attention: Attention, call: Call) -> str | None:
        return "it knows no dropout" if call.dropout_p else None

    table = {"fast": Program(run, why_not), **BACKENDS}
    monkeypatch.setattr(registry, "BACKENDS", table)
    return ran


def test_auto_takes_the_first_that_can(fast: list[str]) -> None:
    q, k, v = make()
    attention("relu", q, k, v)
    attention("softmax", q, k, v, dropout_p=0.5)
    attention("tda", q, k, v)
    assert fast == ["relu", "tda"]


def test_auto_passes_over_the_implementations_of_other_devices(
    fast: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = registry.BACKENDS
    elsewhere = replace(table["fast"], device="cuda")
    monkeypatch.setattr(registry, "BACKENDS", {**table, "fast": elsewhere})
    q, k, v = make()
    attention("tda", q, k, v)
    assert not fast
    attention("tda", q, k, v, impl="fast")
    assert fast == ["tda"]


def test_auto_avoids_sdpa_for_short_rows_where_onednn_multiplies() -> None:
    def backend(length: int, dtype: torch.dtype = torch.float32) -> str:
        q, k, v = (torch.randn(1, 1, length, 8, dtype=dtype) for _ in range(3))
        call = Call(q, k, v, Visibility(), 1.0)
        return registry.choose(ATTENTIONS["softmax"], call, None, "auto")

    assert backend(100) == backend(1000) == "sdpa"
    torch.set_float32_matmul_precision("medium")  # The tests reset it.
    assert backend(100) == "reference"
    assert backend(1000) == backend(100, torch.bfloat16) == "sdpa"


@pytest.mark.parametrize(
    ("name", "arguments", "chosen"),
    [
        ("relu", {}, "cpu"),
        ("relu", {"causal": True, "dropout_p": 0.1}, "cpu"),
        ("relu", {"mask": torch.ones(5, dtype=torch.bool)}, "cpu"),
        ("relu", {"bias": torch.zeros(5)}, "reference"),
        ("relu", {"return_stats": True}, "reference"),
        ("softmax", {}, "sdpa"),
        ("sigmoid", {}, "reference"),
    ],
    ids=str,
)
def test_auto_on_a_cpu(
    name: str, arguments: dict[str, Any], chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    api._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="reluformer"):
        attention(name, *make(), **arguments)
    assert caplog.messages == [f"{name} attention runs on cpu with impl={chosen}"]


def test_an_explicit_request_is_obeyed(fast: list[str]) -> None:
    q, k, v = make()
    attention("relu", q, k, v, impl="reference")
    assert not fast
    attention("relu", q, k, v, impl="fast")
    assert fast == ["relu"]


def test_an_explicit_request_never_falls_back(fast: list[str]) -> None:
    text = "impl='fast' cannot run this relu attention: it knows no dropout"
    with pytest.raises(UserError, match=text):
        attention("relu", *make(), dropout_p=0.5, impl="fast")
    assert not fast


def test_an_unknown_implementation_is_refused_with_the_known_ones(fast: list[str]) -> None:
    with pytest.raises(UserError, match=r"one of auto, fast, .*reference.*, got 'slow'"):
        attention("relu", *make(), impl="slow")


def test_the_reference_runs_whatever_the_others_refuse() -> None:
    assert list(BACKENDS)[-1] == "reference"
    q, k, v = make()
    for arguments in ({"return_weights": True}, {"return_stats": True}, {"dropout_p": 0.1}):
        assert attention("tra", q, k, v, bias=torch.zeros(5), **arguments) is not None


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = make()
    api._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="reluformer"):
        for _ in range(3):
            attention("cog", q, k, v, impl="reference")
    assert caplog.messages == ["cog attention runs on cpu with impl=reference"]
