"""Runs the parts within a time limit and reports them."""

import argparse
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.training import parts
from benchmarks.training.invented_text import invent
from benchmarks.training.processes import check_status, follow, process
from benchmarks.training.rate import Line, describe, rate_of
from reluformer.config.recipe import load_recipe
from reluformer.files import write_json
from reluformer.info import commit
from reluformer.train.data import load_data
from reluformer.train.run_dir import METRICS


class Benchmark:
    """Runs the parts within a time limit and keeps the report on disk up to date."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.quick, self.work, self.out = arguments.quick, work, arguments.out
        self.until = time.perf_counter() + arguments.seconds
        self.folders = {"sentence": arguments.data, "document": arguments.documents}
        self.parts = [part for part in parts.PARTS if part.name in arguments.parts]
        self.report: dict[str, Any] = {
            "versions": _versions(),
            "commit": commit(),
            "cores": os.cpu_count(),
            "settings": {"quick": arguments.quick, "seconds": arguments.seconds},
            "matmul": {},
            "parts": {},
        }

    def run(self) -> None:
        """Run all parts, also after a failure, and print the table."""
        self._guard("matmul", "start", self.matmul)
        for number, part in enumerate(self.parts):
            later = sum(other.reserved for other in self.parts[number + 1 :])
            self._guard("parts", part.name, partial(self.measure, part, later))
        self._guard("matmul", "end", self.matmul)
        self._compare()
        self._save()
        print(table(self.report), flush=True)

    def matmul(self) -> dict[str, Any]:
        """One measurement of the matmul rate."""
        out, log = self.work / "matmul.json", self.work / "matmul.log"
        job = {"library": "matmul", "quick": self.quick, "out": str(out)}
        with process(job, log) as running:
            running.wait(timeout=120)
            check_status(running, log)
        return dict(json.loads(out.read_text()))

    def measure(self, part: parts.Part, later: float) -> dict[str, Any]:
        """Train until the rate is known, leaving `later` seconds for other parts."""
        overrides = [*part.overrides, *parts.BARE, *(parts.QUICK if self.quick else ())]
        folder = self._folder(part.recipe)
        overrides.append(f"data.source={json.dumps(str(folder))}")
        recipe = load_recipe(part.recipe, overrides)
        step = describe(recipe, load_data(recipe))
        started = time.perf_counter()
        until = self.until - later - parts.MATMUL_SECONDS
        if until - started < 15 and not self.quick:
            raise TimeoutError("no time left")
        out, log = self.work / part.name, self.work / f"{part.name}.log"
        out.mkdir()
        job = {
            "library": part.library,
            "recipe": part.recipe,
            "overrides": overrides,
            "out": str(out),
        }
        job["rows"] = step["rows_of_equal_tokens"]

        def done(lines: list[Line]) -> bool:
            rate = rate_of(lines)
            if rate is None or rate.kept < part.intervals:
                return False
            return rate.seconds >= parts.ENOUGH_SECONDS

        with process(job, log) as running:
            lines = follow(running, out / METRICS, until, done)
            check_status(running, log)
        rate = rate_of(lines)
        if rate is None:
            raise TimeoutError(f"{time.perf_counter() - started:.0f} s are too few to measure it")
        last = lines[-1]
        return {
            "tokens_per_second": rate.tokens_per_second,
            "tflops": rate.tokens_per_second * step["flops_per_target_token"] / 1e12,
            "start_up_seconds": last.seconds - started - last.tokens / rate.tokens_per_second,
            "complete": done(lines) or self.quick,
            "torch_compile": part.library == "reluformer" and not self.quick,
            "intervals_kept": rate.kept,
            "interval_speeds": [round(speed) for speed in rate.speeds],
            **step,
            "data": "invented words" if self.work in folder.parents else folder.name,
            "overrides": [text for text in overrides if not text.startswith("data.source")],
        }

    def _folder(self, recipe: str) -> Path:
        """The prepared data of a recipe; invented text if there is none."""
        if self.folders[recipe] is None:
            sizes = {"sentence": (40_000, 10_000, 1), "document": (60_000, 30_000, 20)}
            pairs, vocabulary, per_document = (400, 400, 5) if self.quick else sizes[recipe]
            self.folders[recipe] = invent(
                self.work / f"text-{recipe}",
                pairs=pairs,
                vocabulary=vocabulary,
                per_document=1 if recipe == "sentence" else per_document,
            )
        return Path(self.folders[recipe])

    def _guard(self, kind: str, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Store the result of a part, or its error."""
        try:
            result = work()
        except Exception as problem:
            result = {"failed": f"{type(problem).__name__}: {problem}"}
        self.report[kind][name] = result
        print(f"{kind} {name}: {json.dumps(result)}", flush=True)
        self._save()

    def _compare(self) -> None:
        """Add the ratios to Marian and to the matmul."""
        rates = [rate["tflops"] for rate in self.report["matmul"].values() if "tflops" in rate]
        results = self.report["parts"]
        marian = results.get("sentence marian", {}).get("tokens_per_second")
        for name, part in results.items():
            if "failed" in part:
                continue
            part["of_matmul"] = part["tflops"] / max(rates) if rates else None
            comparable = marian is not None and name.startswith("sentence")
            part["times_marian"] = part["tokens_per_second"] / marian if comparable else None

    def _save(self) -> None:
        if self.out is not None:
            write_json(self.out, self.report)


def table(report: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    rows = [["part", "target tokens/s", "x Marian", "TFLOP/s", "of matmul", "start-up s"]]
    rows.append(["---"] + ["---:"] * 5)
    for name, part in report["parts"].items():
        if "failed" in part:
            rows.append([name, "failed", part["failed"].splitlines()[-1][:80], "", "", ""])
            continue
        mark = "" if part["complete"] else " (time was up)"
        times, share = part["times_marian"], part["of_matmul"]
        rows.append(
            [
                name,
                f"{part['tokens_per_second']:,.0f}{mark}",
                "" if times is None else f"{times:.2f}",
                f"{part['tflops']:.3g}",
                "" if share is None else f"{share:.1%}",
                f"{part['start_up_seconds']:.0f}",
            ]
        )
    for name, result in report["matmul"].items():
        rate = f"{result['tflops']:.3g}" if "tflops" in result else "failed"
        rows.append([f"matmul, {name}", "", "", rate, "", ""])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _versions() -> dict[str, str]:
    names = ("torch", "triton", "transformers", "accelerate", "numpy", "tokenizers")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
