"""Counters of the server in the text format of Prometheus."""

import threading
from bisect import bisect_left
from collections import Counter

# Upper bounds of the buckets of durations, in seconds.
_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """Numbers about requests; nothing that was sent is kept. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[str, tuple[list[int], float]] = {}
        self._totals = {"sentences": 0, "characters": 0, "cancelled": 0}
        self._jobs = {"running": 0, "waiting": 0}

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Count an answer to a request for one of the paths of the server."""
        with self._lock:
            self._requests[path, status] += 1
            buckets, total = self._seconds.get(path, ([0] * (len(_BOUNDS) + 1), 0.0))
            buckets[bisect_left(_BOUNDS, seconds)] += 1
            self._seconds[path] = buckets, total + seconds

    def count_sentences(self, sentences: int, characters: int) -> None:
        """Count translated sentences and the characters of their sources."""
        with self._lock:
            self._totals["sentences"] += sentences
            self._totals["characters"] += characters

    def count_cancelled(self) -> None:
        """Count a job that was cancelled before its end."""
        with self._lock:
            self._totals["cancelled"] += 1

    def set_jobs(self, *, running: int, waiting: int) -> None:
        """Set the present numbers of jobs."""
        with self._lock:
            self._jobs = {"running": running, "waiting": waiting}

    def text(self) -> str:
        """All numbers, version 0.0.4 of the text format."""
        with self._lock:
            lines = [
                "# HELP reluformer_requests_total Answers by path and status code.",
                "# TYPE reluformer_requests_total counter",
            ]
            for (path, status), count in sorted(self._requests.items()):
                labels = f'path="{path}",status="{status}"'
                lines.append(f"reluformer_requests_total{{{labels}}} {count}")
            lines += self._durations()
            for name, help_text in (
                ("sentences", "Translated sentences."),
                ("characters", "Characters of translated sentences."),
                ("cancelled", "Jobs that were cancelled before their end."),
            ):
                lines += [
                    f"# HELP reluformer_{name}_total {help_text}",
                    f"# TYPE reluformer_{name}_total counter",
                    f"reluformer_{name}_total {self._totals[name]}",
                ]
            lines += ["# HELP reluformer_jobs Jobs by state.", "# TYPE reluformer_jobs gauge"]
            lines += [f'reluformer_jobs{{state="{s}"}} {n}' for s, n in self._jobs.items()]
        return "\n".join(lines) + "\n"

    def _durations(self) -> list[str]:
        name = "reluformer_request_seconds"
        lines = [f"# HELP {name} Time until the end of an answer.", f"# TYPE {name} histogram"]
        for path, (buckets, total) in sorted(self._seconds.items()):
            count = 0
            for bound, inside in zip([*map(str, _BOUNDS), "+Inf"], buckets, strict=True):
                count += inside
                lines.append(f'{name}_bucket{{path="{path}",le="{bound}"}} {count}')
            lines.append(f'{name}_sum{{path="{path}"}} {total:.6f}')
            lines.append(f'{name}_count{{path="{path}"}} {count}')
        return lines
