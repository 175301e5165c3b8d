"""Data-parallel training: DDP (`replicate`) or FSDP2 (`shard`), both from torch.distributed.

Both average gradients over ranks. The loss of a rank is therefore multiplied by the number of
ranks, so that gradients are sums over the global batch.
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
    """A model that trains together with its copies or shards in other processes."""

    model: ReLUFormer
    """The model itself; its parameters are shards where weights are divided."""
    forward: Callable[..., Any]
    """What to call in place of the model while training."""
    sharing: Callable[[bool], AbstractContextManager[None]]
    """Around forward and backward of a part of a step: gradients are shared if it is the last."""
    whole_model: Callable[[], AbstractContextManager[None]] = nullcontext
    """While the model is used in other ways than by calling it: every process holds all of it."""


def parallelise(model: ReLUFormer, config: TrainConfig, group: Processes) -> Parallel:
    """Tie the model to its peers as the recipe asks; alone it stays as it is."""
    if group.world == 1:
        return Parallel(model, model, lambda last: nullcontext())
    if config.parallel == "shard":
        return _shard(model)
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Parallel(model, replica, lambda last: nullcontext() if last else replica.no_sync())


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, gathered from all processes; any other tensor as it is."""
    if hasattr(tensor, "full_tensor"):
        gathered: Tensor = tensor.full_tensor()
        return gathered
    return tensor


def alike(tensor: Tensor, like: Tensor) -> Tensor:
    """A full tensor, the same in every process, on the device and divided in the way of `like`."""
    if hasattr(like, "full_tensor"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(like, DTensor)
        tensor = tensor.to(like.device_mesh.device_type)
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor.to(like.device)


def _shard(model: ReLUFormer) -> Parallel:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    # It warns of in-place changes to a layer's output, of which the model makes none.
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
                # The outermost unit is needed again at once when it has run: it never reshards.
                unit.set_reshard_after_forward(unit is not units[0], recurse=False)
                unit.reshard()

    return Parallel(model, model, last_only, whole_model)
