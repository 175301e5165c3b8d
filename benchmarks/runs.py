"""Train several runs of a study side by side on one device; write curves and scores as JSON.

    python -m benchmarks.runs studies/shape.yaml --set data.source=data/europarl-sent \\
        --folder runs/shape --out shape.json --jobs 5 --minutes 9

A study is a YAML file: `recipe`, `common` (settings of all runs) and `runs` (settings by name).
`--jobs N` trains N runs at a time, because small models leave a GPU idle (under CUDA's
multi-process service where it can be started). Unfinished runs continue when the command is
repeated. Failed runs are shown with the last line of their log. `--test PREFIX` also translates
PREFIX.source.txt with every finished run and scores it against PREFIX.target.txt: BLEU with its
signature, and the paired bootstrap against the first run. The length penalty of each run is tuned
on a part of `--dev PREFIX` (benchmarks.tuned).
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from reluformer.config.migration import migrate
from reluformer.files import write_text
from reluformer.info import commit, info

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "reluformer"]
# Decoding waits for the host: few large batches, on a large GPU.
BATCH_TOKENS = 131_072
CURVE = (
    "step",
    "nll",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "attention",
    "dev",
    "rescaled",
)


class Queue:
    """Runs commands, `jobs` at a time, until a time limit."""

    def __init__(self, jobs: int, end: float) -> None:
        self.jobs, self.end = jobs, end
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        """Exit status and last line of each command that failed within the time limit."""

    def run(self, commands: dict[str, list[str]], logs: Path) -> list[str]:
        """Run the commands until the time limit; return the names of those that succeeded."""
        waiting, good = list(commands), []
        live: dict[str, tuple[subprocess.Popen[bytes], float, int]] = {}
        while (waiting or live) and time.monotonic() < self.end:
            while waiting and len(live) < self.jobs:
                name = waiting.pop(0)
                with open(logs / f"{name}.log", "ab") as log:
                    begin = log.tell()
                    process = subprocess.Popen(
                        commands[name], cwd=ROOT, stdout=log, stderr=log, env=_one_thread()
                    )
                live[name] = (process, time.monotonic(), begin)
            for name, (process, start, begin) in list(live.items()):
                if process.poll() is not None:
                    del live[name]
                    self.seconds[name] = round(time.monotonic() - start, 1)
                    if process.returncode == 0:
                        good.append(name)
                    else:
                        line = _last_line(logs / f"{name}.log", begin)
                        self.failed[name] = f"exit status {process.returncode}: {line}"
            time.sleep(0.2)
        for name, (process, start, _) in live.items():
            process.kill()
            self.seconds[name] = round(time.monotonic() - start, 1)
        return good


def _last_line(log: Path, begin: int) -> str:
    """The last line with text that a log has from byte `begin` on, where this start began."""
    lines = log.read_bytes()[begin:].decode("utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing in its log")


def _one_thread() -> dict[str, str]:
    """Processes side by side would otherwise fight for all cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def settings(values: dict[str, Any] | None) -> list[str]:
    """Assignments as the command line takes them."""
    return [f"{name}={json.dumps(value)}" for name, value in (values or {}).items()]


def training(study: dict[str, Any], name: str, folder: Path, extra: list[str]) -> list[str]:
    """The command that trains one run, or goes on with it."""
    assigned = [*settings(study.get("common")), *settings(study["runs"][name]), *extra]
    options = [option for each in assigned for option in ("--set", each)]
    return [*COMMAND, "train", study["recipe"], "--out", str(folder / name), *options]


def curve(run: Path) -> list[dict[str, Any]]:
    """What the run has logged so far."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = (migrate(json.loads(line)) for line in lines)
    return [_rounded({key: each[key] for key in CURVE if key in each}) for each in records]


def outcome(name: str, folder: Path, queue: Queue) -> dict[str, Any]:
    """Time, curve, and why training or translating failed, if either did."""
    found: dict[str, Any] = {"seconds": queue.seconds.get(name, 0.0)}
    for command in (name, f"{name}-translate"):
        if command in queue.failed:
            found["failed"] = queue.failed[command]
    return {**found, "curve": curve(folder / name)}


def scores(
    finished: list[str], first: str, folder: Path, asked: argparse.Namespace, queue: Queue
) -> dict[str, Any] | None:
    """Translate the test sets with every finished run, then compare all with the first, by set.

    None if the time allowed no run to be translated.
    """
    sets = {Path(prefix).name: prefix for prefix in asked.test}
    unit = ["--documents"] if asked.documents else []
    outputs = {name: [folder / each / f"{name}.hypothesis" for each in sets] for name in finished}
    commands = {
        f"{name}-translate": [
            sys.executable, "-m", "benchmarks.tuned", "--model", str(folder / name),
            "--dev", asked.dev, "--test", *sets.values(), "--output", *map(str, files),
            "--batch-tokens", str(BATCH_TOKENS), *unit,
        ]
        for name, files in outputs.items() if not files[-1].exists()
    }  # fmt: skip
    queue.run(commands, folder)
    ready = [name for name in finished if outputs[name][-1].exists()]
    if not ready:
        return None
    ready.sort(key=lambda name: name != first)
    logs = {name: (folder / f"{name}-translate.log").read_text("utf-8") for name in ready}
    tuned = {name: json.loads(log.strip().splitlines()[-1]) for name, log in logs.items()}
    found: dict[str, Any] = {"tuned": tuned}
    for at, (each, prefix) in enumerate(sets.items()):
        given = [o for name in ready for o in ("--hypothesis", str(outputs[name][at]))]
        command = [*COMMAND, "evaluate", "--json", "--metric", "BLEU", "--metric", "chrF2", *unit]
        done = subprocess.run(
            [*command, "--reference", f"{prefix}.target.txt", *given],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found[each] = json.loads(done.stdout)
    return found


def table(report: dict[str, Any]) -> str:
    """One line a run: losses, and what the attentions do at the end."""
    lines = []
    for name, run in report["runs"].items():
        rows = [row for row in run["curve"] if "nll" in row]
        if not rows:
            lines.append(f"{name:28} nothing logged")
            lines += _failure(run)
            continue
        last, dev = rows[-1], [row["dev"]["nll"] for row in rows if "dev" in row]
        sites = " ".join(
            f"{site} {s['row_sum']:.2f}/{s['entropy']:.2f}/{s['zeros']:.2f}/{s['dead_rows']:.2f}"
            for site, s in last["attention"].items()
        )
        shown = " ".join(f"{value:.3f}" for value in dev[-3:])
        lines.append(
            f"{name:28} step {last['step']:6} train {last['nll']:.3f} dev {shown} "
            f"{last['tokens_per_second'] / 1e3:.0f} k/s {run['seconds']:.0f} s | {sites}"
        )
        lines += _failure(run)
    return "\n".join([*lines, "(row sum / entropy / zeros / dead rows)"])


def _failure(run: dict[str, Any]) -> list[str]:
    return [f"    failed: {run['failed']}"] if "failed" in run else []


def shown(scores: dict[str, Any]) -> str:
    """BLEU of each system on each set, its length penalty, and its difference to the first."""
    lines = []
    for each, found in scores.items():
        for system in found.get("systems", []):
            name = system["name"].removesuffix(".hypothesis")
            penalty = scores["tuned"][name]["length penalty"]
            values = "".join(
                f" {'d-' if score['level'] == 'document' else ''}BLEU {score['value']:.2f}"
                + _difference(found["comparisons"], system["name"], score["level"])
                for score in system["scores"]
                if (score["name"], score["case"]) == ("BLEU", "mixed")
            )
            lines.append(f"{each:10} {name:24}{values} penalty {penalty}")
    return "\n".join(lines)


def _difference(comparisons: list[dict[str, Any]], system: str, level: str) -> str:
    for found in comparisons:
        if (found["name"], found["system"], found["level"]) == ("BLEU", system, level):
            low, high = found["interval"]
            return f" ({low:+.2f} to {high:+.2f})"
    return ""


def laid_out(report: dict[str, Any]) -> str:
    """The report as JSON, with one line for each point of a curve."""
    points = {
        f"@{name}@{at}@": json.dumps(point)
        for name, run in report["runs"].items()
        for at, point in enumerate(run["curve"])
    }
    runs = {
        name: {**run, "curve": [f"@{name}@{at}@" for at in range(len(run["curve"]))]}
        for name, run in report["runs"].items()
    }
    text = json.dumps({**report, "runs": runs}, indent=1) + "\n"
    for mark, point in points.items():
        text = text.replace(json.dumps(mark), point)
    return text


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return value


def main() -> None:
    """Train what is left, score what is finished, write and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs")
    parser.add_argument("--folder", type=Path, required=True, help="where runs live")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", nargs="+", help="names of runs")
    parser.add_argument("--test", nargs="+", help="prefixes of test sets to translate and score")
    parser.add_argument("--dev", help="prefix of a set to tune translation on")
    parser.add_argument("--documents", action="store_true", help="translate and score documents")
    arguments = parser.parse_args()
    if (arguments.test is None) != (arguments.dev is None):
        parser.error("--test and --dev need each other")
    study = yaml.safe_load(arguments.study.read_text(encoding="utf-8"))
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.jobs > 1:
        # Kernels of several processes then run at the same time instead of taking turns.
        subprocess.run(["sh", "-c", "nvidia-cuda-mps-control -d >/dev/null 2>&1"], check=False)
    queue = Queue(arguments.jobs, time.monotonic() + 60 * arguments.minutes)
    names = arguments.only or list(study["runs"])
    commands = {name: training(study, name, folder, arguments.set) for name in names}
    finished = queue.run(commands, folder)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "study": study,
        "settings": arguments.set,
        "side by side": arguments.jobs,
        "commit": commit(),
        "machine": info(),
        "runs": {name: outcome(name, folder, queue) for name in names},
    }
    # Scoring takes minutes: a command that is cut meanwhile leaves its curves.
    write_text(arguments.out, laid_out(report))
    if arguments.test:
        report["scores"] = scores(finished, names[0], folder, arguments, queue)
        report["runs"] = {name: outcome(name, folder, queue) for name in names}
        write_text(arguments.out, laid_out(report))
    print(table(report))
    if report.get("scores"):
        print(shown(report["scores"]))


if __name__ == "__main__":
    main()
