"""Kill `prepare`, `train` and `translate --output` at random moments: nothing is lost or half.

    python -m benchmarks.kill_and_resume
    python -m benchmarks.kill_and_resume --kills 50 --out results/DATE-kill-and-resume.json

After each SIGKILL the output of the command must be the old or the whole new one. In the end the
killed training run must have the losses and weights of an undisturbed one, bit by bit. Then each
command runs on a read-only file system and on full disks: it must exit with one sentence, and its
output must be as before or complete. Exits with 1 if any of this does not hold.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.jobs import Broken, Prepare, Train, Translate
from benchmarks.faults.kills import Killed, kill_repeatedly
from reluformer.errors import UserError
from reluformer.info import commit, info
from reluformer.ops.backends.cpu.native import library

# Checkpoints of a training run for each of its kills.
_CHECKPOINTS = 4


def killed_commands(inputs: Path, kills: int, rng: random.Random) -> list[Killed]:
    """Kill each command `kills` times."""
    folder = inputs / "killed"
    prepare = Prepare(inputs, folder)
    prepare.reset(0)
    results = [kill_repeatedly(prepare, kills, prepare.finish(), rng)]
    _show(results[-1])
    every = 5
    whole, train = (
        Train(inputs, inputs / name, every * _CHECKPOINTS * kills, every)
        for name in ("whole", "killed")
    )
    began = time.monotonic()
    first = whole.start()
    while not whole.out.joinpath("checkpoints", f"step-{every:08}").exists():
        if first.wait(0.005):
            raise SystemExit(f"train failed without a fault: {first.message()}")
    startup = time.monotonic() - began
    first.wait()
    pace = (time.monotonic() - began - startup) / (_CHECKPOINTS * kills)
    results.append(kill_repeatedly(train, kills, startup + 2 * pace, rng))
    if different := train.differences(whole):
        raise Broken(f"the killed run differs from the whole one in {', '.join(different)}")
    _show(results[-1])
    translate = Translate(inputs, folder / "translate", whole.out)
    translate.reset(0)
    results.append(kill_repeatedly(translate, kills, translate.finish(), rng))
    _show(results[-1])
    return results


def refused_writes(inputs: Path, levels: int, seed: int) -> list[dict[str, Any]] | None:
    """Rows of the faults of `benchmarks.faults.disk`; None without user namespaces."""
    unshare = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        return None
    out, folder = inputs / "disk.json", inputs / "faults"
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.faults.disk", out, folder, levels, seed]
    ended = subprocess.run([*unshare, *map(str, command)], capture_output=True, text=True)
    if ended.returncode:
        raise Broken(ended.stderr.strip().splitlines()[-1])
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


@contextmanager
def _own_kernels(folder: Path) -> Iterator[None]:
    """Build the CPU kernels of these runs: with others, losses differ in their last digits."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    with suppress(UserError):
        # Without a compiler, all runs use the tiles in torch.
        library.build()
    yield


def _show(row: Killed) -> None:
    print(
        f"{row.command:<10} {row.kills} kills: output as before {row.before}, complete "
        f"{row.complete}, half 0; unfinished files at most {row.most_leftovers}, in the end "
        f"{row.leftovers}; {row.seconds:.2f} s a run",
        flush=True,
    )


def main() -> None:
    """Run all faults and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="kills of each command")
    parser.add_argument("--levels", type=int, default=10, help="full disks of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder, _own_kernels(Path(folder)):
            killed = killed_commands(Path(folder), options.kills, random.Random(options.seed))
            refused = refused_writes(Path(folder), options.levels, options.seed)
    except Broken as error:
        raise SystemExit(f"broken: {error}") from None
    print("no user namespaces: full disks were not tried" if refused is None else refused)
    if options.out is not None:
        report = {
            "command": shlex.join(["python", "-m", "benchmarks.kill_and_resume", *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "environment": info(),
            "seconds": time.monotonic() - began,
            "rows": [row._asdict() for row in killed],
            "faults": refused,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
