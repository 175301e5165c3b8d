"""State of training: model, optimiser and moving average of the weights."""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from reluformer.checkpoint import Tensors
from reluformer.config.train import TrainConfig
from reluformer.errors import UserError
from reluformer.model import ReLUFormer
from reluformer.model.pretrained import distinct_tensors
from reluformer.processes import Processes
from reluformer.train.data_parallel import gather_full, parallelise, shard_like


class TrainerState:
    """Model, optimiser and moving average; updates weights, and saves and restores all tensors."""

    def __init__(self, model: ReLUFormer, config: TrainConfig, group: Processes) -> None:
        self.config, self.group = config, group
        if should_compile(config, group.device):
            compile_layers(model)
        self.parallel = parallelise(model.to(group.device), config, group)
        self.model = model
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = _optimizer(list(self.parameters.values()), config)
        self.ema: list[Tensor] = []
        if config.ema is not None:
            self.ema = [parameter.detach().clone() for parameter in self.parameters.values()]

    def update(self, step: int, rate: float) -> Tensor:
        """Apply the gradients.

        Args:
            step: Number of the step.
            rate: Learning rate.

        Returns:
            Norm of the gradient before clipping, [].
        """
        parameters = list(self.parameters.values())
        limit = math.inf if self.config.clip is None else self.config.clip
        norm = gather_full(nn.utils.clip_grad_norm_(parameters, limit))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        # A CUDA graph adds to gradients at the addresses they had when it was captured.
        keep_memory = should_use_graphs(self.config, self.group)
        self.optimizer.zero_grad(set_to_none=not keep_memory)
        if self.config.ema is not None:
            # The decay grows with the step, so that the random start is soon forgotten.
            decay = min(self.config.ema, (1 + step) / (10 + step))
            moving_average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            moving_average(self.ema, parameters, step)
        return norm

    def tensors(self) -> dict[str, Tensors]:
        """All tensors on the CPU, by kind and name; empty on all ranks but 0."""
        kinds: dict[str, Tensors] = {"model": distinct_tensors(self.model), "optimizer": {}}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                kinds["optimizer"][f"{key}/{name}"] = value
        if self.ema:
            kinds["ema"] = dict(zip(self.parameters, self.ema, strict=True))
        if self.config.parallel == "replicate" and not self.group.main:
            return {}
        # All ranks take part in gathering shards; only rank 0 keeps the result.
        return {kind: self._gather(named) for kind, named in kinds.items()}

    def restore(self, tensors: Mapping[str, Tensors]) -> None:
        """Load optimiser and moving average; the model is loaded before it is sharded."""
        names = list(self.parameters)
        state: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(names))}
        for path, value in tensors["optimizer"].items():
            key, name = path.split("/", 1)
            parameter = self.parameters[name]
            same = value.shape == parameter.shape and key != "step"
            state[self._index[name]][key] = shard_like(value, parameter) if same else value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        if self.ema:
            ema = tensors["ema"]
            self.ema = [shard_like(ema[name], like) for name, like in self.parameters.items()]

    @property
    def _index(self) -> dict[str, int]:
        """Index of each parameter in the state of the optimiser, which is ordered by group."""
        numbered: dict[int, int] = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                numbered[id(parameter)] = len(numbered)
        return {name: numbered[id(parameter)] for name, parameter in self.parameters.items()}

    def _gather(self, named: Tensors) -> Tensors:
        kept: Tensors = {}
        for name, tensor in named.items():
            full = gather_full(tensor)
            if self.group.main:
                kept[name] = full.detach().cpu()
        return kept


def should_compile(config: TrainConfig, device: torch.device) -> bool:
    """Whether layers are compiled on this device."""
    return device.type == "cuda" if config.compile is None else config.compile


def should_use_graphs(config: TrainConfig, group: Processes) -> bool:
    """Whether steps run as CUDA graphs: if the recipe allows it and the run supports it."""
    # Some deterministic algorithms synchronise with the host, which cannot be captured.
    possible = group.device.type == "cuda" and group.world == 1 and not config.deterministic
    return possible if config.graphs is None else possible and config.graphs


def compile_layers(model: ReLUFormer) -> None:
    """Compile each layer in place, with dynamic shapes.

    Layers of one stack share compiled code. Compiling the whole model takes a minute per shape.
    """
    for layer in [*model.encoder, *model.decoder]:
        layer.compile(dynamic=True)


@contextmanager
def compiler_errors() -> Iterator[None]:
    """Turn errors of torch's compiler, such as a missing C++ compiler, into a `UserError`."""
    try:
        yield
    except RuntimeError as error:
        # Imported by torch when it first compiles; the import takes seconds.
        dynamo = sys.modules.get("torch._dynamo.exc")
        if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
            raise
        reason = str(error).strip().partition("\n")[0][:300]
        raise UserError(
            f"layers cannot be compiled, and train.compile=false trains without that: {reason}"
        ) from error


def _optimizer(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW without weight decay for vectors and scalars (biases, norms, gamma)."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)
