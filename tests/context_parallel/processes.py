"""Start real processes once and run many checks in them."""

import importlib
import json
import multiprocessing
import socket
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist

GroupFunction = Callable[[dist.ProcessGroup], None]
WORLD = 3
SIZES = (1, 2, 3)
"""Sizes of the process groups: the last rank, the first two ranks, all ranks."""
_MEMBERS = {1: [WORLD - 1], 2: [0, 1], 3: [0, 1, 2]}


class Check(NamedTuple):
    """A function that all ranks of a group call in the same order, and the sizes of its groups."""

    function: GroupFunction
    sizes: tuple[int, ...] = SIZES


def run_checks(module: ModuleType, folder: Path) -> dict[tuple[str, int], str]:
    """Run the module's `CHECKS` in WORLD processes.

    A group stops at its first failure: its ranks may be out of step and would wait for each other.

    Returns:
        The errors of all ranks for each (name, group size) that ran; an empty string on success.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The fork server imports everything once, so that each process starts quickly.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", module.__name__])
    processes = [
        context.Process(target=_work, args=(module.__name__, rank, port, folder), daemon=True)
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=200)
        assert process.exitcode == 0
    errors: dict[tuple[str, int], str] = {}
    for rank in range(WORLD):
        for name, size, error in json.loads((folder / f"{rank}.json").read_text()):
            report = f"rank {rank}: {error}" if error else ""
            errors[name, size] = errors.get((name, size), "") + report
    return errors


def _work(module: str, rank: int, port: int, folder: Path) -> None:
    """Run all checks of the groups that this rank belongs to."""
    torch.set_num_threads(1)
    checks: Mapping[str, Check] = importlib.import_module(module).CHECKS
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    groups = {size: dist.new_group(_MEMBERS[size]) for size in SIZES}
    errors = []
    for size in SIZES:
        if rank not in _MEMBERS[size]:
            continue
        for name, check in checks.items():
            if size not in check.sizes:
                continue
            torch.manual_seed(0)
            try:
                check.function(groups[size])
            except Exception:
                errors.append((name, size, traceback.format_exc()))
                break
            errors.append((name, size, ""))
    (folder / f"{rank}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()
