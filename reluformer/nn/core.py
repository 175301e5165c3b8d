"""Attention of queries, keys and values as a module: learned options and the row loss."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from reluformer.errors import UserError
from reluformer.nn.options import initial_values, options_dict
from reluformer.nn.row_loss import add_gradient, entropy_gradient, row_sum_gradient
from reluformer.ops.api import attend
from reluformer.ops.backends.registry import BACKENDS
from reluformer.ops.call import AttentionResult, Call
from reluformer.ops.family.table import lookup
from reluformer.ops.stats import RowSums, SumsLevel
from reluformer.ops.varlen import relu_attention_varlen
from reluformer.ops.visibility import Visibility

RECOMMENDED = "normalised_relu"
"""Attention of every drop-in layer unless another is named."""
ROW_LOSS = 0.001
"""Weight of the row loss of the recommended attention."""


class AttentionCore(nn.Module):
    """An attention of the family with its learned options, for layers that project themselves.

    While the module is in training mode and gradients are recorded, its backward pass adds the
    gradient of

        row_loss * mean |ln row_sum| + entropy_loss * mean max(H - 0.7 ln n, 0)

    with means over the live rows and heads of the call. The row sums are those before row
    normalisation, H is the entropy of a row and n the number of keys that it sees. The output is
    not changed. See `set_row_loss_scale` for loops that scale their loss.

    A learned option is stored as an offset from its initial value: `threshold_offset` [H],
    `gamma_offset` [1] (of ln gamma), and so on. Weight decay therefore pulls it to its initial
    value, and half precision keeps small changes. A state dict without these offsets leaves them as
    they are, so that the weights of a softmax model can be loaded.

    Args:
        heads: Number H of query heads.
        head_dim: Width D of a head.
        attention: Name in `reluformer.ATTENTIONS`; the default is `normalised_relu`.
        options: Options of the attention, fixed at the given numbers (learned options that are not
            given are learned), and of this layer:
            `row_loss`, by default 0.001 for `normalised_relu` and 0 for others;
            `entropy_loss`, by default 0;
            `impl`, the backend, by default "auto".
        value_dim: Width Dv of a value; None for `head_dim`.
        device: Device of the offsets.
        dtype: Dtype of the offsets.

    Raises:
        UserError: If the attention, an option or the head width is not allowed.
    """

    row_loss_scale: float | Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        attention: str = RECOMMENDED,
        options: Mapping[str, Any] | None = None,
        *,
        value_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.row = lookup(attention)
        self.heads, self.head_dim = heads, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        fixed = options_dict(options)
        self.impl: str = fixed.pop("impl", "auto")
        self.row_loss: float = fixed.pop("row_loss", ROW_LOSS if attention == RECOMMENDED else 0.0)
        self.entropy_loss: float = fixed.pop("entropy_loss", 0.0)
        self.row_loss_scale = 1.0
        self.fixed_options = fixed
        self._check()
        self._initial = initial_values(self.row, fixed)
        for name in self._initial:
            shape = (1,) if name == "gamma" else self._shape(name)
            offset = torch.zeros(shape, device=device, dtype=dtype)
            self.register_parameter(f"{name}_offset", nn.Parameter(offset))

    def reset_parameters(self) -> None:
        """Set the learned options to their initial values."""
        for name in self._initial:
            nn.init.zeros_(getattr(self, f"{name}_offset"))

    @property
    def needs_gate(self) -> bool:
        """Whether a call must pass `gate`, which the layer computes from its input."""
        return self.row.learned.get("gate") == "token"

    def options(self) -> dict[str, Any]:
        """The fixed and the learned options, as keyword arguments of `reluformer.attention`."""
        options = dict(self.fixed_options)
        for name, initial in self._initial.items():
            offset = getattr(self, f"{name}_offset")
            offset = offset.to(torch.promote_types(offset.dtype, torch.float32))
            if name == "gamma":
                options[name] = offset.squeeze(0).exp() * initial
            else:
                options[name] = offset + initial
        return options

    def adapted_scale(self, scale: float) -> float | None:
        """The factor on scores for a layer that was written for softmax with this factor.

        None, for the attention's own, if it compares by cosine. The two halves of a differential
        attention have half the width.
        """
        if self.row.cosine:
            return None
        return scale * 2**0.5 if self.row.halves else scale

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        key_lengths: Tensor | None = None,
        window: int | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        gate: Tensor | None = None,
        query_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from q to k and v; arguments that are not listed are those of `attention`.

        Args:
            q: Queries [B, H, Tq, D].
            k: Keys [B, Hkv, Tk, D].
            v: Values [B, Hkv, Tk, Dv].
            gate: Input of the gate of `gated`, [B, H, Tq, Dv].
            query_mask: Bool [B, Tq]; False for padding, which the losses leave out.
            need_weights: Whether to return the weights, which needs the reference backend.

        Returns:
            The output [B, H, Tq, Dv] and the weights [B, H, Tq, Tk] or None.
        """
        call = Call(
            q,
            k,
            v,
            Visibility(mask, causal, key_lengths, window),
            self.row.default_scale(self.head_dim) if scale is None else scale,
            bias,
            dropout_p,
            return_weights=need_weights,
            return_sums=self._sums(q, k),
        )
        options = self.options()
        if gate is not None:
            options["gate"] = gate
        output, weights, _, sums = attend(self.row, call, options, self.impl)
        if sums is not None:
            valid = None if query_mask is None else query_mask[:, None]
            output = self._add_losses(output, sums, valid)
        return output, weights

    def packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        causal: bool = False,
        window: int | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attend over packed sequences; the arguments are those of `relu_attention_varlen`.

        Returns:
            The output [N, H, Dv].

        Raises:
            UserError: If the attention has no packed form.
        """
        rule = self.row.rectified(self.options())
        has_extras = self.row.cosine or self.row.output_transform is not None
        if rule is None or has_extras or rule.negative_slope:
            raise UserError(
                f"attention {self.row.name!r} takes no packed sequences; "
                f"rectified ones such as {RECOMMENDED!r} do"
            )
        attend_packed: Callable[..., Any] = partial(
            relu_attention_varlen,
            *(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k),
            causal=causal,
            window=window,
            gamma=rule.gamma,
            length_exponent=rule.length_exponent,
            power=rule.power,
            threshold=rule.threshold,
            row_normalise=rule.row_normalise,
            scale=self.row.default_scale(self.head_dim) if scale is None else scale,
            dropout_p=dropout_p,
            impl=self.impl,
        )
        level = self._sums(q, k)
        if level is None:
            output: Tensor = attend_packed()
            return output
        result: AttentionResult = attend_packed(return_sums=level)
        assert result.sums is not None
        return self._add_losses(result.output, result.sums, None)

    def extra_repr(self) -> str:
        """Attention, sizes and options, for `repr`."""
        given = {**self.fixed_options, "row_loss": self.row_loss, "entropy_loss": self.entropy_loss}
        shown = ", ".join(f"{name}={value}" for name, value in given.items() if value)
        return f"{self.row.name!r}, heads={self.heads}, head_dim={self.head_dim}" + (
            f", {shown}" if shown else ""
        )

    def _sums(self, q: Tensor, k: Tensor) -> SumsLevel | None:
        """Statistics that the losses of this call need; None outside training."""
        adds_loss = self.training and torch.is_grad_enabled()
        if not adds_loss or not (self.row_loss or self.entropy_loss):
            return None
        has_gradient = q.requires_grad or k.requires_grad or any(self._offsets_require_grad())
        if not has_gradient:
            return None
        return "entropy" if self.entropy_loss else "row_sum"

    def _offsets_require_grad(self) -> list[bool]:
        return [getattr(self, f"{name}_offset").requires_grad for name in self._initial]

    def _add_losses(self, output: Tensor, sums: RowSums, valid: Tensor | None) -> Tensor:
        """`output` [B, H, Tq, Dv], whose backward pass adds the gradients of the losses."""
        with torch.no_grad():
            gradient = row_sum_gradient(sums.row_sum, valid) * (self.row_loss * self.row_loss_scale)
        output = add_gradient(output, sums.row_sum, gradient)
        if not self.entropy_loss:
            return output
        assert sums.entropy is not None
        with torch.no_grad():
            gradient = entropy_gradient(sums.entropy, sums.visible, sums.row_sum, valid)
            gradient = gradient * (self.entropy_loss * self.row_loss_scale)
        return add_gradient(output, sums.entropy, gradient)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Shape of a learned option."""
        width = self.heads * self.value_dim
        return {"head": (self.heads,), "width": (width,), "pair": (2,)}[self.row.learned[name]]

    def _check(self) -> None:
        """Raise a `UserError` for options that the attention does not take."""
        if self.impl not in ("auto", *BACKENDS):
            raise UserError(
                f"impl must be one of {', '.join(['auto', *BACKENDS])}, got {self.impl!r}"
            )
        for name, weight in (("row_loss", self.row_loss), ("entropy_loss", self.entropy_loss)):
            if not isinstance(weight, (int, float)) or not weight >= 0:
                raise UserError(f"{name} must be a number of at least 0, got {weight!r}")
            if weight and not self.row.regularisable:
                raise UserError(
                    f"{name} must be 0 for {self.row.name} attention, which is not rectified or "
                    f"has an output norm, got {weight}"
                )
        for name, value in self.fixed_options.items():
            if isinstance(value, Tensor):
                raise UserError(f"option {name} must be a number, got a tensor")
        # A call of one row checks the other options and the width.
        q = torch.zeros(1, self.heads, 1, self.head_dim, device="cpu", dtype=torch.float32)
        scale = self.row.default_scale(self.head_dim)
        with torch.no_grad():
            attend(self.row, Call(q, q, q, Visibility(), scale), self.fixed_options, "reference")

    def _present(self, name: str) -> Tensor:
        """A learned offset, or its initial value if it is on the meta device."""
        offset: Tensor = getattr(self, name).detach()
        return torch.zeros_like(offset, device="cpu") if offset.is_meta else offset

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        names = [f"{name}_offset" for name in self._initial]
        if not any(prefix + name in state_dict for name in names):
            # The state dict belongs to a model with another attention.
            state_dict |= {prefix + name: self._present(name) for name in names}
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def set_row_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Multiply the losses that the attentions of a model add in their backward passes.

    Every backward pass adds the loss of each attention once, with gradient 1. A training loop that
    multiplies its own loss passes the same factor here: 1/N for gradient accumulation over N
    batches, `scaler.get_scale()` for `torch.amp.GradScaler`.

    Args:
        model: Module with attentions of `reluformer.nn`.
        scale: Factor, a number or a tensor of shape [].

    Raises:
        UserError: If the model has no attention of `reluformer.nn`.
    """
    cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
    if not cores:
        raise UserError(f"model must have attentions of reluformer.nn, got {type(model).__name__}")
    for core in cores:
        core.row_loss_scale = scale
