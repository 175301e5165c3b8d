"""Another attention for every attention of an existing model."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from reluformer.errors import UserError
from reluformer.nn.core import RECOMMENDED, AttentionCore
from reluformer.nn.multihead import MultiheadAttention, plan_conversion
from reluformer.nn.sdpa import (
    RedirectedAttention,
    count_calls,
    mentions_softmax,
    plan_redirection,
    why_not_redirected,
)
from reluformer.nn.transformer import avoid_fast_path

LOOKS_LIKE_ATTENTION = re.compile(r"Att(n|ention)\w*$", re.IGNORECASE)
"""Names of classes that are attentions, or contain one."""

_DATA_PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


@dataclass(frozen=True)
class Replacement:
    """Report of `replace_attention`; `str` is a readable table."""

    attention: str
    """Name of the new attention."""
    changed: Mapping[str, str]
    """Class of each replaced module before the replacement, by the module's name."""
    unchanged: Mapping[str, str]
    """Why a module that looks like an attention keeps its own, by the module's name."""

    def __str__(self) -> str:
        lines = [f"{len(self.changed)} attentions are {self.attention} now:"]
        lines += [f"  {name or '(the model)'}: {kind}" for name, kind in self.changed.items()]
        if self.unchanged:
            lines.append(f"{len(self.unchanged)} modules keep their attention:")
            lines += [f"  {name or '(the model)'}: {why}" for name, why in self.unchanged.items()]
        return "\n".join(lines)


def replace_attention(
    model: nn.Module, attention: str = RECOMMENDED, **options: Any
) -> Replacement:
    """Replace every attention of a model, in place; the weights stay.

    Examples:
        >>> model = torch.nn.Transformer(512, 8)
        >>> print(replace_attention(model, "normalised_relu", power=4))

    The function replaces `torch.nn.MultiheadAttention` (also in torch's transformer layers, whose
    fast path is switched off), the attentions of transformers, and modules that call
    `scaled_dot_product_attention` once, such as those of timm. Learned options of the new attention
    are new parameters: create the optimizer afterwards. A `torch.nn.MultiheadAttention` inside a
    model of transformers stays, because the configuration that is saved with the model cannot name
    another attention for it.

    Args:
        model: Any module.
        attention: Name in `reluformer.ATTENTIONS`; the default is `normalised_relu`.
        **options: Options of the attention and of `AttentionCore`.

    Returns:
        The replaced modules, and those that look like an attention and could not be replaced.

    Raises:
        UserError: If no attention of the model can be replaced, or an option is not allowed.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    changed: dict[str, str] = {}
    unchanged: dict[str, str] = {}
    # Mistakes are found before the first change: an error leaves the model as it was.
    steps: list[Callable[[], object]] = []
    _refuse_wrapped(model)
    visited = list(_outside_transformers(model))
    models = []
    for name, module in visited:
        if _is_transformers_model(module):
            _hf_layers().check_replacement(module, attention, options)
            models.append((name, module))
            continue
        step = _plan(module, attention, options)
        if isinstance(step, str):
            unchanged[name] = step
        elif step is not None:
            changed[name] = type(module).__name__
            steps.append(step)
    for step in steps:
        step()
    for name, module in models:
        done, left = _replace_in_transformers(module, attention, options)
        changed |= {_join(name, path): kind for path, kind in done.items()}
        unchanged |= {_join(name, path): why for path, why in left.items()}
    if not changed:
        reasons = "; ".join(f"{name or 'it'}: {reason}" for name, reason in unchanged.items())
        raise UserError(
            f"model has no attention that can be replaced, got {type(model).__name__}"
            + (f" ({reasons})" if reasons else "")
        )
    for _, module in visited:
        # Encoders of torch have a fast path of their own.
        avoid_fast_path(module)
    return Replacement(attention, changed, unchanged)


def _outside_transformers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules, without the modules inside models of transformers."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        if _is_transformers_model(module):
            inside.append(_join(name, ""))
        yield name, module


def _plan(
    module: nn.Module, attention: str, options: Mapping[str, Any]
) -> Callable[[], object] | str | None:
    """The function that replaces the attention of a module, or the reason why there is none.

    None for modules that are no attention.
    """
    kind = type(module)
    if kind in (nn.MultiheadAttention, MultiheadAttention):
        if "forward" in vars(module):
            return f"the forward of this {kind.__name__} has been replaced on the instance"
        return plan_conversion(module, attention, options)  # type: ignore[arg-type]
    if isinstance(module, RedirectedAttention):
        return plan_redirection(module, attention, options)
    if isinstance(module, nn.MultiheadAttention):
        return f"{kind.__name__} is a subclass of MultiheadAttention"
    if isinstance(module, AttentionCore) or kind.__module__.startswith("torch."):
        return None
    if not _is_attention(module):
        return f"{kind.__name__} computes softmax by itself" if mentions_softmax(kind) else None
    is_container = count_calls(kind) == 0 and not mentions_softmax(kind)
    if is_container and any(_is_attention(inner) for inner in module.modules() if inner != module):
        return None
    reason = why_not_redirected(module)
    if reason is not None:
        return f"{kind.__name__} is not known, and {reason}"
    return plan_redirection(module, attention, options)


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention by its class's name or its source."""
    kind = type(module)
    named = LOOKS_LIKE_ATTENTION.search(kind.__name__) is not None
    return named or (not kind.__module__.startswith("torch.") and bool(count_calls(kind)))


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse models of data parallelism, which do not average the gradients of new parameters."""
    for module in model.modules():
        for base in type(module).__mro__:
            if base.__name__ in _DATA_PARALLEL and base.__module__.startswith("torch."):
                raise UserError(
                    f"the attention must be replaced before a model becomes {base.__name__}"
                )


def _is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, without importing the package."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )


def _replace_in_transformers(
    model: nn.Module, attention: str, options: Mapping[str, Any]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Replaced and remaining attentions of a model of transformers."""
    report = _hf_layers().replace_attention_modules(model, attention, options)
    kept = {
        name: f"{type(module).__name__} runs torch's attention in a model of transformers, and a "
        "saved folder would load it with softmax"
        for name, module in import_module("reluformer.hf.attention_modules").left_at_softmax(model)
    }
    return dict(report.changed), {**dict(report.unchanged), **kept}


def _hf_layers() -> Any:
    """`reluformer.hf.layers`, which imports this package and an optional one."""
    # The package registers the attentions with transformers.
    import_module("reluformer.hf")
    return import_module("reluformer.hf.layers")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
