"""Data-parallel training: DDP (`replicate`) or FSDP2 (`shard`), both from torch.distributed.

Both average gradients over ranks. The loss of a rank is therefore multiplied by the number of
ranks, so that gradients are sums over the global batch.

FSDP is imported where it is used: its import takes as long as the first steps of a small run.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from reluformer.config.train import TrainConfig
from reluformer.model import ReLUFormer
from reluformer.processes import Processes


@dataclass(frozen=True)
class Parallel:
    """A model in data-parallel training, with its replicas or shards in other processes."""

    model: ReLUFormer
    """The model; with FSDP its parameters are shards."""
    forward: Callable[..., Any]
    """Forward pass for training, to be called instead of the model."""
    sharing: Callable[[bool], AbstractContextManager[None]]
    """Context of forward and backward of one batch; True, for the last batch of a step, reduces
    gradients over the ranks."""
    whole_model: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context in which every rank holds all parameters, for use of the model outside `forward`."""


def parallelise(model: ReLUFormer, config: TrainConfig, group: Processes) -> Parallel:
    """Wrap the model for the ranks of `group`; with one rank it is not wrapped."""
    if group.world == 1:
        return Parallel(model, model, lambda last: nullcontext())
    if config.parallel == "shard":
        return _shard(model)
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Parallel(model, replica, lambda last: nullcontext() if last else replica.no_sync())


def gather_full(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, gathered from all ranks; other tensors are returned as is."""
    if hasattr(tensor, "full_tensor"):
        gathered: Tensor = tensor.full_tensor()
        return gathered
    return tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Put a full tensor, equal on all ranks, on the device of `like`, and shard it if `like` is."""
    if hasattr(like, "full_tensor"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(like, DTensor)
        tensor = tensor.to(like.device_mesh.device_type)
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor.to(like.device)


def _shard(model: ReLUFormer) -> Parallel:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    # FSDP warns about in-place changes to the output of a layer, which the model never makes.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for layer in [*model.encoder, *model.decoder]:
        fully_shard(layer)
    fully_shard(model)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]

    @contextmanager
    def last_only(last: bool) -> Iterator[None]:
        units[0].set_requires_gradient_sync(last)
        yield

    @contextmanager
    def whole_model() -> Iterator[None]:
        for unit in units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for unit in units:
                # The backward pass begins with the outermost unit, which therefore never reshards.
                unit.set_reshard_after_forward(unit is not units[0], recurse=False)
                unit.reshard()

    return Parallel(model, model, last_only, whole_model)
