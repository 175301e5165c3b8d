"""The model with all that learning needs beside it: optimiser, moving average, peers."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from reluformer.checkpoint import Tensors
from reluformer.config.train import TrainConfig
from reluformer.model import ReLUFormer
from reluformer.model.pretrained import distinct_tensors
from reluformer.processes import Processes
from reluformer.train.data_parallel import alike, parallelise, whole


class Learner:
    """Holds the tensors of a run; turns gradients into new weights; copies all to and from CPU."""

    def __init__(self, model: ReLUFormer, config: TrainConfig, group: Processes) -> None:
        self.config, self.group = config, group
        if compiles(config, group.device):
            compile_layers(model)
        self.parallel = parallelise(model.to(group.device), config, group)
        self.model = model
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = _optimizer(list(self.parameters.values()), config)
        self.ema: list[Tensor] = []
        if config.ema is not None:
            self.ema = [parameter.detach().clone() for parameter in self.parameters.values()]

    def update(self, step: int, rate: float) -> Tensor:
        """Apply the gradients with a learning rate; return their norm before clipping, []."""
        parameters = list(self.parameters.values())
        limit = math.inf if self.config.clip is None else self.config.clip
        norm = whole(nn.utils.clip_grad_norm_(parameters, limit))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        # A recorded step adds to gradients where they lay when it was recorded.
        self.optimizer.zero_grad(set_to_none=not replays(self.config, self.group))
        if self.config.ema is not None:
            # Early on, a short memory forgets the random start.
            decay = min(self.config.ema, (1 + step) / (10 + step))
            moving_average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            moving_average(self.ema, parameters, step)
        return norm

    def tensors(self) -> dict[str, Tensors]:
        """Everything on the CPU, by kind and name; empty in all processes but the main one."""
        kinds: dict[str, Tensors] = {"model": distinct_tensors(self.model), "optimizer": {}}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                kinds["optimizer"][f"{key}/{name}"] = value
        if self.ema:
            kinds["ema"] = dict(zip(self.parameters, self.ema, strict=True))
        if self.config.parallel == "replicate" and not self.group.main:
            return {}
        # Gathering shards needs every process, keeping them only one.
        return {kind: self._gather(named) for kind, named in kinds.items()}

    def restore(self, tensors: Mapping[str, Tensors]) -> None:
        """Take back what `tensors` gave, except the model's own, which come before sharding."""
        names = list(self.parameters)
        state: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(names))}
        for path, value in tensors["optimizer"].items():
            key, name = path.split("/", 1)
            parameter = self.parameters[name]
            same = value.shape == parameter.shape and key != "step"
            state[self._index[name]][key] = alike(value, parameter) if same else value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        if self.ema:
            parameters = self.parameters.items()
            self.ema = [alike(tensors["ema"][name], parameter) for name, parameter in parameters]

    @property
    def _index(self) -> dict[str, int]:
        """Number of each parameter in the optimiser's own state, which goes group by group."""
        numbered: dict[int, int] = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                numbered[id(parameter)] = len(numbered)
        return {name: numbered[id(parameter)] for name, parameter in self.parameters.items()}

    def _gather(self, named: Tensors) -> Tensors:
        kept: Tensors = {}
        for name, tensor in named.items():
            full = whole(tensor)
            if self.group.main:
                kept[name] = full.detach().cpu()
        return kept


def compiles(config: TrainConfig, device: torch.device) -> bool:
    """Whether the recipe asks for compiled layers on this device."""
    return device.type == "cuda" if config.compile is None else config.compile


def replays(config: TrainConfig, group: Processes) -> bool:
    """Whether the recipe asks for CUDA graphs, and this run can use them."""
    # Some deterministic algorithms wait for the host, which cannot be recorded.
    possible = group.device.type == "cuda" and group.world == 1 and not config.deterministic
    return possible if config.graphs is None else possible and config.graphs


def compile_layers(model: ReLUFormer) -> None:
    """Compile each layer in place, for all shapes of batches at once.

    Layers of one stack share their code; the whole model would take a minute for each shape.
    """
    for layer in [*model.encoder, *model.decoder]:
        layer.compile(dynamic=True)


def _optimizer(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; vectors and single numbers (biases, norms, gamma) do not decay."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)
