"""Modules that call `scaled_dot_product_attention`, such as those of timm, with another attention.

While the forward pass of such a module runs, calls of torch's function go to an `AttentionCore`.
The module keeps its class's code, parameters and names.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from reluformer.errors import UserError
from reluformer.nn.core import RECOMMENDED, AttentionCore
from reluformer.nn.masks import MaskSizes, from_sdpa

_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads")
# Classes of converted modules by their original class.
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
_WIDTHS = ("head_dim", "attention_head_size", "d_head")
_TOTAL_WIDTHS = ("embed_dim", "n_embd", "hidden_size", "d_model", "dim")
_HAND_WRITTEN = (torch.softmax, Tensor.softmax, functional.softmax)


class RedirectedAttention(nn.Module):
    """Base of converted modules: their calls of torch's attention go to `core`."""

    original: ClassVar[type[nn.Module]]
    """Class of the module before the conversion."""
    has_softmax: ClassVar[bool]
    """Whether its forward pass may also compute softmax by hand."""
    core: AttentionCore

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Forward pass of the original class with the attention of `core`."""
        redirection = _Redirection(self.core, self.original.__name__, self.has_softmax)
        # `with ... as` hides the attributes of the context from torch.compile.
        with redirection:
            output = super().forward(*arguments, **keywords)
        if redirection.calls != 1:
            raise UserError(
                f"{self.original.__name__}.forward must call scaled_dot_product_attention once to "
                f"have its attention replaced, got {redirection.calls} calls"
            )
        return output

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is created at run time, and pickle cannot import it.
        return _rebuild, (self.original,), self.__dict__


def plan_redirection(
    module: nn.Module, attention: str = RECOMMENDED, options: Mapping[str, Any] | None = None
) -> Callable[[], None]:
    """Prepare another attention for a module that calls `scaled_dot_product_attention`.

    Args:
        module: Module with the attributes `num_heads` and `head_dim`, `embed_dim` or `scale`, or
            other usual names of these.
        attention: Name in `reluformer.ATTENTIONS`.
        options: Options of the attention and of `AttentionCore`.

    Returns:
        The function that replaces the attention, in place; until then the module stays as it is.

    Raises:
        UserError: If the attention of the module cannot be replaced.
    """
    is_redirected = isinstance(module, RedirectedAttention)
    reason = None if is_redirected else why_not_redirected(module)
    if reason is not None:
        raise UserError(f"{type(module).__name__} cannot be replaced: {reason}")
    core = _core(module, attention, options)

    def redirect() -> None:
        if not is_redirected:
            module.__class__ = redirected_class(type(module))
        _install(module, core)

    return redirect


def why_not_redirected(module: nn.Module) -> str | None:
    """One clause that says why the attention of a module cannot be replaced, or None if it can."""
    calls = count_calls(type(module))
    if calls is None:
        return "its source cannot be read"
    if "forward" in vars(module):
        return "its forward has been replaced on the instance, for example by accelerate"
    if hasattr(module, "core"):
        return "it has an attribute core of its own"
    if calls != 1:
        return f"its forward calls scaled_dot_product_attention {calls} times and not once"
    if first_size(module, _HEADS) is None or _head_dim(module) is None:
        return "it has no attributes num_heads and head_dim, embed_dim or scale"
    return None


def redirected_class(original: type[nn.Module]) -> type[nn.Module]:
    """Subclass of a module's class whose calls of torch's attention are redirected."""
    if original not in _CLASSES:
        name = f"Redirected{original.__name__}"
        fields = {"original": original, "has_softmax": mentions_softmax(original)}
        _CLASSES[original] = type(name, (RedirectedAttention, original), fields)
    return _CLASSES[original]


def attention_layer(
    base: type[nn.Module], attention: str = RECOMMENDED, options: Mapping[str, Any] | None = None
) -> type[nn.Module]:
    """Class that builds a module of class `base` with another attention.

    Args:
        base: Class whose forward calls `scaled_dot_product_attention` once.
        attention: Name in `reluformer.ATTENTIONS`.
        options: Options of the attention and of `AttentionCore`.
    """
    redirected = redirected_class(base)

    def build(self: nn.Module, *arguments: Any, **keywords: Any) -> None:
        base.__init__(self, *arguments, **keywords)
        _install(self, _core(self, attention, options))
        # The instance belongs to a class that pickle can rebuild.
        self.__class__ = redirected

    return type(base.__name__, (redirected,), {"__init__": build})


class _Redirection(TorchFunctionMode):
    """Context in which calls of torch's attention go to a core, and are counted."""

    def __init__(self, core: AttentionCore, owner: str, has_softmax: bool) -> None:
        super().__init__()
        self.core, self.calls = core, 0
        self.has_softmax = has_softmax
        """Whether a call of softmax is an error."""
        self.owner = owner
        """Name of the class whose attention was replaced, for messages."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.calls += 1
            return self.attend(*args, **(kwargs or {}))
        if self.has_softmax and func in _HAND_WRITTEN:
            raise self._error("no softmax beside it", "a call of softmax")
        if func is Tensor.unflatten:
            # torch.compile cannot trace the method of Python, which calls super().
            func = torch.unflatten
        return func(*args, **(kwargs or {}))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`scaled_dot_product_attention` with the attention of the core."""
        heads = self.core.heads
        if query.dim() < 4 or query.shape[1] != heads:
            raise self._error(
                f"queries [batch, {heads} heads, ..., rows, width]", f"shape {tuple(query.shape)}"
            )
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scale = self.core.adapted_scale(scale)
        if query.dim() > 4:
            if attn_mask is not None:
                raise self._error("no mask beside queries of more than 4 dimensions", "a mask")
            return self._attend_in_windows(query, key, value, is_causal, dropout_p, scale)
        sizes = MaskSizes(query.shape[0], heads, query.shape[-2], key.shape[-2])
        masks = from_sdpa(attn_mask, is_causal, sizes)._asdict()
        output: Tensor = self.core(query, key, value, **masks, dropout_p=dropout_p, scale=scale)[0]
        return output

    def _attend_in_windows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        dropout_p: float,
        scale: float | None,
    ) -> Tensor:
        """Attend from queries [B, H, windows, T, D] to the keys of the same window."""
        query, key, value = (each.transpose(1, -3) for each in (query, key, value))
        flat = (each.flatten(0, -4) for each in (query, key, value))
        output: Tensor = self.core(*flat, causal=is_causal, dropout_p=dropout_p, scale=scale)[0]
        return output.view(*query.shape[:-1], -1).transpose(1, -3)

    def _error(self, need: str, got: str) -> UserError:
        return UserError(
            f"{self.owner}.forward must call scaled_dot_product_attention with {need} to have its "
            f"attention replaced, got {got}"
        )


def _install(module: Any, core: AttentionCore) -> None:
    module.core = core.train(module.training)
    if hasattr(module, "fused_attn"):
        # timm calls torch's function only if this is True.
        module.fused_attn = True


def _core(module: nn.Module, attention: str, options: Mapping[str, Any] | None) -> AttentionCore:
    """A core that fits a module."""
    weight = next(module.parameters())
    heads, head_dim = first_size(module, _HEADS), _head_dim(module)
    assert heads is not None and head_dim is not None
    core = AttentionCore(
        heads, head_dim, attention, options, device=weight.device, dtype=weight.dtype
    )
    if core.needs_gate:
        name = type(module).__name__
        raise UserError(f"attention {attention!r} needs a gate, which {name} does not have")
    return core


@cache
def source_of(function: Callable[..., Any]) -> str | None:
    """Source of a function; None if it cannot be read."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return None


def count_calls(kind: type[nn.Module]) -> int | None:
    """Number of calls of torch's attention in the sources of `forward` and of its methods.

    None if `forward` has no source.
    """
    calls = _calls_in(kind.forward)
    if calls is None:
        return None
    return calls + sum(_calls_in(method) or 0 for method in _called_methods(kind))


@cache
def _calls_in(function: Callable[..., Any]) -> int | None:
    source = source_of(function)
    if source is None:
        return None
    own = functional.scaled_dot_product_attention
    # The source may call the function by a name under which its module imported it.
    variables = getattr(inspect.unwrap(function), "__globals__", {})
    names = {name for name, value in variables.items() if value is own}
    return sum(len(re.findall(rf"\b{name}\(", source)) for name in names | {own.__name__})


def mentions_softmax(kind: type[nn.Module]) -> bool:
    """Whether the forward pass of a class, or a method that it calls, names softmax."""
    functions = [kind.forward, *_called_methods(kind)]
    return any("softmax" in (source_of(function) or "") for function in functions)


def _called_methods(kind: type[nn.Module]) -> list[Callable[..., Any]]:
    """Methods that the source of `forward` calls, one for each call."""
    names = re.findall(r"self\.(\w+)\(", source_of(kind.forward) or "")
    methods = (getattr(kind, name, None) for name in names)
    return [method for method in methods if inspect.isfunction(method)]


def _head_dim(module: nn.Module) -> int | None:
    """Width of a head, from the attributes of a module."""
    width, total = first_size(module, _WIDTHS), first_size(module, _TOTAL_WIDTHS)
    heads = first_size(module, _HEADS)
    if width is not None:
        return width
    if total is not None and heads:
        return total // heads
    scale = getattr(module, "scale", None)
    return round(scale**-2) if isinstance(scale, float) and scale > 0 else None


def first_size(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """First of some attributes that is a whole number."""
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _rebuild(original: type[nn.Module]) -> nn.Module:
    cls = redirected_class(original)
    return cls.__new__(cls)
