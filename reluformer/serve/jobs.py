"""Work in threads for requests: a bounded queue, time limits, cancellation."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from reluformer.serve.limits import Limits
from reluformer.serve.metrics import Metrics
from reluformer.translation.cancellation import Cancelled, cancellable, check_cancelled

Emit = Callable[[Any], None]
"""Passes a result on to the request, from the thread of the work."""

_END = object()


class Refused(Exception):
    """A request that is not answered now: a status code and a sentence for the client."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Job:
    """Work of one request; iterate over its results."""

    def __init__(self, seconds: float) -> None:
        self.cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + seconds
        self._seconds = seconds
        self._results: asyncio.Queue[Any] = asyncio.Queue()

    def emit(self, result: Any) -> None:
        """Add a result, from any thread."""
        # The loop is closed if the server was stopped in a hurry.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._results.put_nowait, result)

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Results as they arrive.

        Raises:
            Refused: The time is over.
        """
        while True:
            left = self._deadline - self._loop.time()
            try:
                result = await asyncio.wait_for(self._results.get(), max(left, 0))
            except TimeoutError:
                raise Refused(
                    503, f"the translation took longer than {self._seconds:g} seconds"
                ) from None
            if result is _END:
                return
            if isinstance(result, BaseException):
                raise result
            yield result


class Jobs:
    """Runs work in threads, in the order of arrival."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self._threads = ThreadPoolExecutor(limits.workers, thread_name_prefix="translate")
        self._jobs: set[Job] = set()
        self.is_closing = False

    @property
    def unfinished(self) -> int:
        """Number of jobs that wait or are computed."""
        return len(self._jobs)

    @asynccontextmanager
    async def start(self, work: Callable[[Emit], None]) -> AsyncIterator[Job]:
        """Run `work` in a thread; leaving the block cancels it.

        Raises:
            Refused: The queue is full, or the server is stopping.
        """
        if self.is_closing:
            raise Refused(503, "the server is stopping")
        if len(self._jobs) >= self.limits.workers + self.limits.queue:
            raise Refused(429, "too many translations are waiting, try again later")
        job = Job(self.limits.seconds)
        self._jobs.add(job)
        self._count()
        future = self._threads.submit(self._run, job, work)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda done: self._finish(loop, job, done))
        try:
            yield job
        finally:
            job.cancelled.set()
            future.cancel()

    def cancel(self) -> None:
        """Refuse new jobs and cancel all others."""
        self.is_closing = True
        # A copy, because `close` runs in another thread than the one in which jobs end.
        for job in list(self._jobs):
            job.cancelled.set()

    def close(self) -> None:
        """Refuse new jobs, cancel all others and wait for their threads."""
        self.cancel()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, job: Job, work: Callable[[Emit], None]) -> None:
        try:
            with cancellable(job.cancelled):
                check_cancelled()
                work(job.emit)
            job.emit(_END)
        except Cancelled:
            self._end_early(job)
        # The request reports it.
        except BaseException as error:
            job.emit(error)

    def _finish(self, loop: asyncio.AbstractEventLoop, job: Job, done: "Future[None]") -> None:
        if done.cancelled():
            self._end_early(job)
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._forget, job)

    def _end_early(self, job: Job) -> None:
        self.metrics.count_cancelled()
        # A request that still waits is one that the server's end has cancelled.
        job.emit(Refused(503, "the server is stopping"))

    def _forget(self, job: Job) -> None:
        self._jobs.discard(job)
        self._count()

    def _count(self) -> None:
        running = min(len(self._jobs), self.limits.workers)
        self.metrics.set_jobs(running=running, waiting=len(self._jobs) - running)
