"""Real processes that run named checks together, so that one start serves many tests."""

import importlib
import json
import multiprocessing
import socket
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

Check = Callable[[dist.ProcessGroup], None]
"""A check is run by all ranks of a group, with the same arguments and in the same order."""

WORLD = 3
SIZES = (1, 2, 3)
"""Groups of so many ranks run every check: the last one, the first two, all."""


def run(module: ModuleType, folder: Path) -> dict[str, str]:
    """What went wrong in each of the module's CHECKS, by `name-ranks`; nothing where it is right.

    A group stops at its first failure: ranks may be out of step, and wait in vain for each other.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # From a server that has imported everything, a process starts in a moment.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", module.__name__])
    started = [
        context.Process(target=_work, args=(module.__name__, rank, port, folder), daemon=True)
        for rank in range(WORLD)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=200)
        assert process.exitcode == 0
    found: dict[str, str] = {}
    for rank in range(WORLD):
        for name, error in json.loads((folder / f"{rank}.json").read_text()).items():
            found[name] = found.get(name, "") + (f"rank {rank}: {error}" if error else "")
    return found


def _work(module: str, rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    checks: Mapping[str, Check] = importlib.import_module(module).CHECKS
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    members = {1: [WORLD - 1], 2: [0, 1], 3: [0, 1, 2]}
    groups = {size: dist.new_group(members[size]) for size in SIZES}
    errors = {}
    for size in SIZES:
        if rank not in members[size]:
            continue
        for name, check in checks.items():
            torch.manual_seed(0)
            try:
                check(groups[size])
                errors[f"{name}-{size}"] = ""
            except Exception:
                errors[f"{name}-{size}"] = traceback.format_exc()
                break
    (folder / f"{rank}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()
