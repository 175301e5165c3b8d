"""Hidden states of our own models, as `output_hidden_states` of transformers returns them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class HiddenStates:
    """The hidden states of one forward pass."""

    def __init__(self) -> None:
        self.tensors: tuple[Tensor, ...] | None = None
        """Embeddings, then the output of each layer, the last one normalised; all [B, T, width].

        None if they were not requested.
        """

    def append(self, state: Tensor) -> None:
        """Append one hidden state [B, T, width]."""
        self.tensors = (*(self.tensors or ()), state)


@contextmanager
def collecting(
    layers: Iterable[nn.Module], norm: nn.Module, is_requested: bool
) -> Iterator[HiddenStates]:
    """Context in which a stack of layers leaves its hidden states.

    Args:
        layers: The layers; the first argument of each is its input [B, T, width].
        norm: The norm behind the last layer.
        is_requested: Whether to collect; if not, the modules are not touched.
    """
    states = HiddenStates()
    if not is_requested:
        yield states
        return

    def append_input(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        states.append(arguments[0])

    def append_output(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        states.append(output)

    hooks = [layer.register_forward_pre_hook(append_input) for layer in layers]
    hooks.append(norm.register_forward_hook(append_output))
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
