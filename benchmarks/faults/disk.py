"""Full disks and read-only file systems, in a mount namespace of their own.

    unshare --map-root-user --mount python -m benchmarks.faults.disk OUT.json INPUTS

`benchmarks.kill_and_resume` starts this; it needs no privileges where user namespaces are allowed.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.faults.jobs import COMPLETE, Broken, Job, Prepare, Train, Translate

MEBIBYTE = 2**20


def _mount(*options: str) -> None:
    subprocess.run(["mount", *options], check=True)


def _fill(folder: Path, free: int) -> None:
    """Write a file that leaves `free` bytes of the file system."""
    space = os.statvfs(folder)
    size = space.f_bavail * space.f_frsize - free
    with open(folder / "filler", "wb") as file:
        file.write(b"\0" * max(size, 0))


def _used(folder: Path) -> int:
    space = os.statvfs(folder)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def _refused(job: Job, fault: str) -> str:
    """Run a job that meets a fault; return its state, after checking how it ended."""
    command = job.start()
    if not command.wait(120):
        raise Broken(f"{job.name} hangs with {fault}")
    text = command.log.read_text(encoding="utf-8")
    if command.status == 0:
        return job.state()
    if (
        command.status != 2
        or "Traceback" in text
        or not command.message().startswith("reluformer:")
    ):
        raise Broken(f"{job.name} with {fault}: status {command.status}, {text[-500:]!r}")
    return job.state()


def faults(job: Job, disk: Path, levels: int, rng: random.Random) -> list[dict[str, Any]]:
    """Run a job on a read-only file system and on `levels` full ones; then without a fault."""
    job.reset(1)
    _mount("-o", "remount,ro", str(disk))
    rows = [{"command": job.name, "fault": "read-only", "cases": 1, "complete": 0}]
    if _refused(job, "a read-only file system") == COMPLETE:
        raise Broken(f"{job.name} has written a read-only file system")
    _mount("-o", "remount,rw", str(disk))
    before = _used(disk)
    job.finish()
    need = _used(disk) - before
    complete = 0
    if isinstance(job, Train):
        shutil.rmtree(job.out)
        job.latest = 0
    for level in range(levels):
        job.reset(1)
        free = 0 if level == 0 else int(rng.uniform(0.02, 1.0) * max(need, 64 * 1024))
        _fill(disk, free)
        complete += _refused(job, f"{free} bytes left") == COMPLETE
        (disk / "filler").unlink()
    job.reset(1)
    job.finish()
    if job.leftovers():
        raise Broken(f"{job.name} leaves unfinished files")
    rows.append({"command": job.name, "fault": "full disk", "cases": levels, "complete": complete})
    return rows


def main() -> None:
    """Mount a small file system and run the jobs on it."""
    out, inputs = Path(sys.argv[1]), Path(sys.argv[2])
    levels, seed = int(sys.argv[3]), int(sys.argv[4])
    disk = inputs / "disk"
    disk.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={64 * MEBIBYTE}", "none", str(disk))
    rng = random.Random(seed)
    whole = Train(inputs, inputs / "whole", 40)
    whole.finish()
    rows = faults(Prepare(inputs, disk / "prepare"), disk, levels, rng)
    train = Train(inputs, disk / "train", 40)
    rows += faults(train, disk, levels, rng)
    if different := train.differences(whole):
        raise Broken(f"a run that met full disks differs in {different}")
    rows += faults(Translate(inputs, disk / "translate", whole.out), disk, levels, rng)
    out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
