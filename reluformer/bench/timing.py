"""Time and memory of calls: interleaved rounds, so that ratios compare like with like."""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], Any]
Times = dict[str, list[float]]

# Short calls are repeated until a measurement takes about two milliseconds.
_LONG_ENOUGH_MS, _MOST_REPEATS = 2.0, 20

# Who is so many times as slow as the fastest, and would take so many seconds, is left out.
_FAR_BEHIND, _PATIENCE = 10.0, 5.0


class OutOfTime(Exception):
    """The least number of rounds would take longer than there is time."""


def in_short(problem: Exception) -> str:
    """Kind and first line of a problem."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:300]


class Clock:
    """Times calls on a device; on a GPU the queue is filled behind a pause, so launches are free.

    Nothing is flushed between calls: inputs are meant to be larger than the cache, or to take
    turns (see `cache_size`).
    """

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.host: dict[str, float] = {}
        """Microseconds until a call returns, of the last `rounds`; on a GPU only."""
        self.left_out: dict[str, str] = {}
        """Who failed or was too slow to take part in the last `rounds`, and why."""

    def once(self, call: Call, repeat: int, pause_us: float) -> float:
        """Milliseconds per call."""
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            return (time.perf_counter() - start) * 1e3 / repeat
        first, last = _event(), _event()
        _pause(pause_us)
        first.record()
        for _ in range(repeat):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / repeat

    def rounds(
        self,
        calls: Mapping[str, Call],
        least: int,
        seconds: float,
        left: float = math.inf,
        yardstick: str | None = None,
    ) -> Times:
        """Milliseconds of every call, by name, in interleaved rounds; the order turns by one each.

        At least `least` rounds, then more until `seconds` are spent. Raises OutOfTime before the
        first if the least would take more than the seconds `left`. Who is far slower than the
        fastest, or fails before the first round, is left out; not the yardstick.
        """
        single, failed = self._single(calls, yardstick)
        self.left_out = failed | _too_slow(single, least, yardstick)
        names = [name for name in calls if name not in self.left_out]
        repeats = {
            name: max(1, min(_MOST_REPEATS, math.ceil(_LONG_ENOUGH_MS / max(single[name], 1e-3))))
            for name in names
        }
        cost = sum(single[name] * repeats[name] for name in names) / 1e3
        if least * cost > left:
            raise OutOfTime(f"{least} rounds take {least * cost:.0f} s, {max(left, 0):.0f} s left")
        self.host = {name: self._host(calls[name]) for name in names} if self.cuda else {}
        times: Times = {name: [] for name in names}
        end = time.perf_counter() + seconds
        at = 0
        while at < least or time.perf_counter() + cost < end:
            turn = at % len(names)
            for name in names[turn:] + names[:turn]:
                pause = 200.0 + 1.5 * repeats[name] * self.host.get(name, 0.0)
                times[name].append(self.once(calls[name], repeats[name], pause))
            at += 1
        return times

    def _single(
        self, calls: Mapping[str, Call], yardstick: str | None
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Milliseconds of a second call of each, and why others than the yardstick failed."""
        single, failed = {}, {}
        for name, call in calls.items():
            try:
                call()
                single[name] = self.once(call, 1, 1000.0)
            except Exception as problem:
                if name == yardstick:
                    raise
                failed[name] = in_short(problem)
        return single, failed

    def peak(self, call: Call) -> float:
        """MiB that a call allocates at most, beyond what was there before."""
        if not self.cuda:
            return _cpu_peak(call) / 2**20
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def cache_size(self) -> int:
        """Bytes that inputs must exceed so as not to be read from the cache; 0 if unknown."""
        return int(torch.cuda.get_device_properties(0).L2_cache_size) if self.cuda else 0

    def _host(self, call: Call) -> float:
        """Median microseconds of ten calls behind a pause."""
        torch.cuda.synchronize()
        _pause(20_000.0)
        found = []
        for _ in range(10):
            start = time.perf_counter()
            call()
            found.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
        return statistics.median(found)


def _too_slow(single: dict[str, float], least: int, yardstick: str | None) -> dict[str, str]:
    """Reasons, by name, from the milliseconds of single calls."""
    fastest = min((ms for name, ms in single.items() if name != yardstick), default=math.inf)
    return {
        name: f"{ms / fastest:.0f} times as slow as the fastest, about {ms:,.0f} ms a call"
        for name, ms in single.items()
        if ms > _FAR_BEHIND * fastest and least * ms / 1e3 > _PATIENCE
    }


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _pause(microseconds: float) -> None:
    """Keep the GPU busy with nothing, for about so long, while the host goes on."""
    torch.cuda._sleep(int(2000 * microseconds))  # type: ignore[no-untyped-call]


def ratio(mine: list[float], other: list[float]) -> float:
    """Median over the rounds of other / mine: above 1, mine is faster."""
    return statistics.median(b / a for a, b in zip(mine, other, strict=True))


def _cpu_peak(call: Call) -> int:
    """Bytes, from the profiler's record of every allocation."""
    from torch.profiler import ProfilerActivity, profile

    # The profiler's library otherwise announces each start and stop on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    results = record.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
