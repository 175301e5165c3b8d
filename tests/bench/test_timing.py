"""Rounds, ratios and peak memory, with invented times where real ones are not needed."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reluformer.bench.measure import summarise
from reluformer.bench.report import MATMUL
from reluformer.bench.timing import Clock, OutOfTime, ratio
from tests.bench.synthetic import DECODE, FEATURES, KINDS, dense

TIMES = st.lists(st.floats(0.01, 100), min_size=1, max_size=20)


@given(TIMES, st.floats(0.1, 10))
def test_a_ratio_is_the_median_of_pairs(times: list[float], factor: float) -> None:
    # Drift that affects both calls of a round does not change the ratio.
    assert ratio(times, [factor * each for each in times]) == pytest.approx(factor)


def test_a_ratio_is_not_the_ratio_of_medians() -> None:
    mine, other = [1.0, 2.0, 9.0], [2.0, 3.0, 1.0]
    assert ratio(mine, other) == 1.5
    assert statistics.median(other) / statistics.median(mine) != 1.5


def test_rounds_are_interleaved_and_reach_the_minimum() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    clock = Clock("cpu")
    monotone = clock.rounds(calls, 10, 0.0)
    assert {name: len(found) for name, found in monotone.items()} == dict.fromkeys("abc", 10)
    # Consecutive calls of one name count once: the warm-up of each, then three per round. The order
    # rotates, and a round may begin with the name that ended the previous one.
    runs = [name for at, name in enumerate(order) if at == 0 or order[at - 1] != name]
    assert runs[:9] == ["a", "b", "c", "a", "b", "c", "b", "c", "a"]


def test_rounds_continue_until_the_time_is_spent() -> None:
    calls = {"a": lambda: None}
    assert len(Clock("cpu").rounds(calls, 2, 0.05)["a"]) > 2
    with pytest.raises(OutOfTime, match="3 rounds take"):
        Clock("cpu").rounds(calls, 3, 0.0, left=-1.0)


def test_the_first_call_which_may_compile_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    clock = Clock("cpu")
    monkeypatch.setattr(clock, "once", lambda call, repeat, pause: 1.0)
    clock.rounds({"a": lambda: called.append("a")}, 3, 0.0)
    assert called == ["a"]


def test_a_call_far_slower_than_the_fastest_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = {"fast": 100.0, "slow": 900.0, "too slow": 1100.0}
    clock = Clock("cpu")
    monkeypatch.setattr(clock, "once", lambda call, repeat, pause: durations[call()])
    calls = {name: lambda name=name: name for name in durations}
    times = clock.rounds(calls, 10, 0.0)
    assert set(times) == {"fast", "slow"} and len(times["slow"]) == 10
    reason = "11 times as slow as the fastest, about 1,100 ms a call"
    assert clock.left_out == {"too slow": reason}
    durations["yardstick"] = 1.0
    calls["yardstick"] = lambda: "yardstick"
    assert set(clock.rounds(calls, 10, 0.0, yardstick="yardstick")) == {*times, "yardstick"}
    # Slow relative to the fastest, but short in seconds: kept.
    durations |= {"fast": 1.0, "slow": 9.0, "too slow": 100.0}
    assert set(clock.rounds(calls, 10, 0.0)) == set(durations) and not clock.left_out


def test_a_failing_call_is_left_out_but_the_yardstick_raises() -> None:
    def fails() -> None:
        raise RuntimeError("no such kernel\nwith details")

    clock = Clock("cpu")
    calls = {"a": lambda: None, "fails": fails, "b": lambda: None}
    assert set(clock.rounds(calls, 2, 0.0)) == {"a", "b"}
    assert clock.left_out == {"fails": "RuntimeError: no such kernel"}
    with pytest.raises(RuntimeError, match="no such kernel"):
        clock.rounds(calls, 2, 0.0, yardstick="fails")
    with pytest.raises(RuntimeError, match="^fails: RuntimeError: no such kernel"):
        clock.all_rounds(calls, 2)
    assert set(clock.all_rounds({"a": lambda: None}, 2)) == {"a"}


def test_peak_memory_of_a_call() -> None:
    given = torch.zeros(1 << 18)

    def call() -> None:
        first = given + 1
        second = first + 1
        del first
        second.add_(1)

    assert Clock("cpu").peak(call) == pytest.approx(2.0, rel=0.01)


def test_rows_compare_with_the_best_softmax_and_the_matmul() -> None:
    case = dense(4096)
    times = {
        "relu triton": [1.0, 2.0, 4.0],
        "SDPA-flash": [5.0, 5.0, 5.0],
        "SDPA-cuDNN": [2.0, 3.0, 12.0],
        MATMUL: [1.0, 1.0, 1.0],
    }
    rows = summarise(
        case, "forward", KINDS, times, matmul_flops=1e12, host={"relu triton": 7.0}, peaks={}
    )
    found = {row.name: row for row in rows}
    ours = found["relu triton"]
    assert ours.ms == 2.0 and (ours.low, ours.high, ours.pairs) == (1.0, 4.0, 3)
    # cuDNN has the least median: ratios 2, 1.5 and 3.
    assert ours.x_softmax == 2.0 and found["SDPA-cuDNN"].x_softmax == 1.0
    assert ours.tflops == pytest.approx(case.flops("forward") / 2e-3 / 1e12)
    assert ours.of_matmul == pytest.approx(case.flops("forward") / 2.0 / 1e12)
    assert ours.host_us == 7.0
    assert found[MATMUL].tflops == pytest.approx(1e12 / 1e-3 / 1e12)
    assert found[MATMUL].x_softmax is None


def test_rows_without_softmax_have_no_ratio() -> None:
    times = {"relu triton": [1.0], MATMUL: [1.0]}
    rows = summarise(
        dense(4096), "both", {"relu triton": "relu"}, times, matmul_flops=1.0, host={}, peaks={}
    )
    assert rows[0].x_softmax is None and rows[0].of_matmul is not None


def test_decode_rows_have_a_bandwidth_and_feature_rows_a_relative_cost() -> None:
    times = {"relu triton": [0.5], MATMUL: [1.0]}
    rows = summarise(
        DECODE, "decode", {"relu triton": "relu"}, times, matmul_flops=1.0, host={}, peaks={}
    )
    assert rows[0].gbytes == pytest.approx(2 * 8 * 8192 * 128 * 2 / 0.5e-3 / 1e9)
    times = {"plain": [1.0, 2.0], "dropout": [3.0, 8.0], MATMUL: [1.0, 1.0]}
    kinds = {"plain": "relu", "dropout": "relu"}
    rows = summarise(FEATURES, "both", kinds, times, matmul_flops=1.0, host={}, peaks={})
    assert [row.relative for row in rows[:2]] == [1.0, 3.5]
    half = summarise(
        FEATURES, "both", kinds, times, matmul_flops=1.0, host={}, peaks={}, work={"dropout": 0.5}
    )
    assert [row.relative for row in half[:2]] == [1.0, 7.0]
    assert rows[0].tflops is None
