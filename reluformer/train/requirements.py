"""Estimate of what a run needs, before its model is built."""

import dataclasses
import logging
import os
from typing import NamedTuple

import torch

from reluformer.config.recipe import Recipe
from reluformer.errors import UserError
from reluformer.model import ModelConfig, ReLUFormer

log = logging.getLogger("reluformer")

# Bytes of a parameter in training: weight, gradient, and two moments of Adam in float32.
_BYTES_PER_PARAMETER = 16
# Values that the backward pass keeps for a token: of the width in an encoder and a decoder layer,
# and of the slots. Counted from the operations of a layer, not fitted to measurements; attention
# maps of backends without fused kernels are not included.
_ENCODER_WIDTHS, _DECODER_WIDTHS, _SLOTS = 12, 20, 3
# Copies of the logits: logits, log-probabilities, gradient.
_LOGITS = 3


class Requirements(NamedTuple):
    """Size of a run."""

    parameters: int
    """Number of parameters of the model."""
    state_bytes: int
    """Memory of weights, gradients and optimiser."""
    memory_bytes: int
    """Memory in all, with the activations of one batch; a rough estimate."""
    tokens: int
    """Largest number of ids on a side that the run trains on."""

    def __str__(self) -> str:
        memory = f"about {max(self.memory_bytes / 1e9, 0.1):,.1f} GB of memory"
        return (
            f"{self.parameters / 1e6:,.1f} million parameters, {memory}, "
            f"at most {self.tokens:,} tokens"
        )


def estimate(recipe: Recipe, vocabulary: int) -> Requirements:
    """Estimate the size of a run of `recipe` with a vocabulary of that size, on one device."""
    model, train = recipe.model_with(vocabulary), recipe.train
    parameters = count_parameters(model)
    state = parameters * (_BYTES_PER_PARAMETER + (4 if train.ema is not None else 0))
    widths = model.encoder_layers * _ENCODER_WIDTHS + model.decoder_layers * _DECODER_WIDTHS
    layers = model.encoder_layers + model.decoder_layers
    values = widths * model.width + layers * _SLOTS * model.slots + _LOGITS * vocabulary
    activations = 4 * train.batch_tokens * values
    tokens = train.steps * train.accumulate * train.batch_tokens
    return Requirements(parameters, state, state + activations, tokens)


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, from models of one and two layers without memory."""

    def count(encoder_layers: int, decoder_layers: int) -> int:
        sized = dataclasses.replace(
            config, encoder_layers=encoder_layers, decoder_layers=decoder_layers
        )
        with torch.device("meta"):
            model = ReLUFormer(sized)
        return sum(parameter.numel() for parameter in model.parameters())

    smallest = count(1, 1)
    encoder, decoder = count(2, 1) - smallest, count(1, 2) - smallest
    return smallest + (config.encoder_layers - 1) * encoder + (config.decoder_layers - 1) * decoder


def check(requirements: Requirements, device: torch.device, ranks: int) -> None:
    """Raise UserError if weights and optimiser alone, over all ranks, exceed the memory.

    The estimate of the activations is rough: if only they exceed it, a warning says so.
    """
    available = _memory(device)
    if requirements.state_bytes / ranks > available:
        raise UserError(
            f"model needs {requirements.state_bytes / 1e9:,.0f} GB for weights and optimiser, but "
            f"the {device.type} has {available / 1e9:,.0f} GB"
        )
    if requirements.memory_bytes > available:
        log.warning(
            "this run may need %.0f GB of memory, but the %s has %.0f GB; a smaller "
            "train.batch_tokens needs less",
            requirements.memory_bytes / 1e9,
            device.type,
            available / 1e9,
        )


def _memory(device: torch.device) -> int:
    """Memory of the device in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
