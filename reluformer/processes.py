"""The processes of one torchrun job: rank, world size, device and process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from reluformer.errors import UserError

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Processes:
    """Rank and device of this process, and collective operations with the other ranks."""

    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes files and reports."""
        return self.rank == 0

    def add(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Block until every rank has called this."""
        if self.world > 1:
            dist.barrier()


def own_rank() -> int:
    """Rank that torchrun assigned to this process; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def processes(device: DeviceKind | None) -> Iterator[Processes]:
    """Join the process group that torchrun started; without torchrun there is one process.

    Args:
        device: Kind of device; None takes a GPU if there is one.

    Raises:
        UserError: `device` is "cuda" and there is no GPU for this process.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = find_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if world == 1:
        yield Processes(0, 1, chosen)
        return
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=chosen if chosen.type == "cuda" else None)
    try:
        yield Processes(own_rank(), world, chosen)
    finally:
        dist.destroy_process_group()


def find_device(kind: DeviceKind | None, local_rank: int = 0) -> torch.device:
    """The device of a kind, by default a GPU if there is one; a `UserError` if it is missing."""
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError("device is cuda, but torch finds no GPU")
    if local_rank >= count:
        raise UserError(
            f"device is cuda, but local rank {local_rank} has no GPU of its own: torch finds "
            f"{count}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
