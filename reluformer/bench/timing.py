"""Time and peak memory of calls, measured in interleaved rounds so that ratios are paired."""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], Any]
Times = dict[str, list[float]]

# Short calls are repeated until a measurement takes about two milliseconds.
_MIN_MS, _MAX_REPEATS = 2.0, 20

# A call is left out if it is this many times as slow as the fastest one and its rounds would take
# longer than this many seconds.
_MAX_SLOWDOWN, _MAX_SECONDS = 10.0, 5.0


class OutOfTime(Exception):
    """The minimum number of rounds would take longer than the remaining time."""


def in_short(problem: Exception) -> str:
    """Class and first line of an exception."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:300]


class Clock:
    """Times calls on a device.

    On a GPU, a pause kernel holds the stream while calls are queued, so that launch time is not
    measured. Caches are not flushed between calls: inputs must be larger than the cache, or
    several input sets must take turns (see `cache_size`).
    """

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.host: dict[str, float] = {}
        """Host microseconds of each call in the last `rounds`; empty on a CPU."""
        self.left_out: dict[str, str] = {}
        """Reason for each call that failed or was too slow in the last `rounds`."""

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
        """Time all calls in interleaved rounds, whose order rotates by one call.

        Calls that fail, or that are far slower than the fastest, are left out.

        Args:
            calls: Functions by name.
            least: Minimum number of rounds.
            seconds: Further rounds start until this much time has passed.
            left: Remaining seconds of the whole run.
            yardstick: Name of a call that is never left out and whose errors are raised.

        Returns:
            Milliseconds of each round, by name.

        Raises:
            OutOfTime: If `least` rounds would take longer than `left`.
        """
        single, failed = self._single(calls, yardstick)
        self.left_out = failed | _too_slow(single, least, yardstick)
        names = [name for name in calls if name not in self.left_out]
        repeats = {
            name: max(1, min(_MAX_REPEATS, math.ceil(_MIN_MS / max(single[name], 1e-3))))
            for name in names
        }
        cost = sum(single[name] * repeats[name] for name in names) / 1e3
        if least * cost > left:
            raise OutOfTime(f"{least} rounds take {least * cost:.0f} s, {max(left, 0):.0f} s left")
        self.host = {name: self._host(calls[name]) for name in names} if self.cuda else {}
        times: Times = {name: [] for name in names}
        end = time.perf_counter() + seconds
        count = 0
        while count < least or time.perf_counter() + cost < end:
            turn = count % len(names)
            for name in names[turn:] + names[:turn]:
                pause = 200.0 + 1.5 * repeats[name] * self.host.get(name, 0.0)
                times[name].append(self.once(calls[name], repeats[name], pause))
            count += 1
        return times

    def all_rounds(self, calls: Mapping[str, Call], count: int) -> Times:
        """Time every call in `count` rounds, as `rounds` does.

        Raises:
            RuntimeError: If a call fails or is far slower than the fastest.
        """
        times = self.rounds(calls, count, 0.0)
        for name, reason in self.left_out.items():
            raise RuntimeError(f"{name}: {reason}")
        return times

    def _single(
        self, calls: Mapping[str, Call], yardstick: str | None
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Milliseconds of the second call of each function, and the errors of those that failed."""
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
        """Peak MiB that a call allocates on top of the memory in use before it."""
        if not self.cuda:
            return _cpu_peak(call) / 2**20
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def cache_size(self) -> int:
        """Bytes of the L2 cache, which inputs must exceed to be read from memory; 0 on a CPU."""
        return int(torch.cuda.get_device_properties(0).L2_cache_size) if self.cuda else 0

    def _host(self, call: Call) -> float:
        """Median host microseconds of ten calls that queue behind a pause."""
        torch.cuda.synchronize()
        _pause(20_000.0)
        samples = []
        for _ in range(10):
            start = time.perf_counter()
            call()
            samples.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
        return statistics.median(samples)


def _too_slow(single: dict[str, float], least: int, yardstick: str | None) -> dict[str, str]:
    """Reason for each call that is too slow, from the milliseconds of single calls."""
    fastest = min((ms for name, ms in single.items() if name != yardstick), default=math.inf)
    return {
        name: f"{ms / fastest:.0f} times as slow as the fastest, about {ms:,.0f} ms a call"
        for name, ms in single.items()
        if ms > _MAX_SLOWDOWN * fastest and least * ms / 1e3 > _MAX_SECONDS
    }


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _pause(microseconds: float) -> None:
    """Keep the GPU busy for about this long while the host continues."""
    torch.cuda._sleep(int(2000 * microseconds))  # type: ignore[no-untyped-call]


def ratio(mine: list[float], other: list[float]) -> float:
    """Median over the rounds of other / mine: above 1, mine is faster."""
    return statistics.median(b / a for a, b in zip(mine, other, strict=True))


def _cpu_peak(call: Call) -> int:
    """Peak bytes, from the profiler's record of all allocations."""
    # Without this the profiler logs each start and stop to standard error.
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
