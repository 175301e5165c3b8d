"""torch's transformer layers with an attention of the family.

Encoder layers of torch compute softmax in evaluation mode on a fast path that never calls their
attention module. The classes here have no such path, and no conversion to nested tensors.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from reluformer.nn.core import RECOMMENDED
from reluformer.nn.multihead import MultiheadAttention

Activation = str | Callable[[Tensor], Tensor]
Options = Mapping[str, Any] | None


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` with another attention than softmax.

    Args:
        attention: Name in `reluformer.ATTENTIONS`; the default is `normalised_relu`.
        attention_options: Options of the attention and of `AttentionCore`.

    The other arguments are those of torch, and the initial weights, too.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = functional.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str = RECOMMENDED,
        attention_options: Options = None,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
        convert_attentions(self, attention, attention_options)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The layer's output; arguments are those of torch, without nested tensors."""
        # torch turns masks of booleans into floats here, which fused kernels do not take.
        masks = (src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            x = src + self._sa_block(self.norm1(src), *masks)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(src + self._sa_block(src, *masks))
        output: Tensor = self.norm2(x + self._ff_block(x))
        return output


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` with another attention than softmax.

    Args:
        attention: Name in `reluformer.ATTENTIONS`, for self-attention and cross-attention;
            the default is `normalised_relu`.
        attention_options: Options of the attention and of `AttentionCore`.

    The other arguments are those of torch, and the initial weights, too.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = functional.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str = RECOMMENDED,
        attention_options: Options = None,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
        convert_attentions(self, attention, attention_options)


class TransformerEncoder(nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` with another attention than softmax, without nested tensors.

    Args:
        encoder_layer: Layer of this module or of torch, which is copied.
        num_layers: Number of copies.
        norm: Norm after the last layer.
        enable_nested_tensor: Ignored; padding is handled by masks.
        mask_check: Ignored.
        attention: Name in `reluformer.ATTENTIONS`. None keeps the attention of a layer of this
            module, and gives a layer of torch the recommended one.
        attention_options: Options of the attention and of `AttentionCore`.
    """

    def __init__(
        self,
        encoder_layer: nn.TransformerEncoderLayer,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
        *,
        attention: str | None = None,
        attention_options: Options = None,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm, False, mask_check)
        convert_attentions(self, attention, attention_options)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Output of the last layer; arguments are those of torch, without nested tensors."""
        output = src
        for layer in self.layers:
            # The attention recognises causal masks.
            output = layer(output, mask, src_key_padding_mask, bool(is_causal))
        return output if self.norm is None else self.norm(output)


class TransformerDecoder(nn.TransformerDecoder):
    """`torch.nn.TransformerDecoder` with another attention than softmax.

    Args:
        decoder_layer: Layer of this module or of torch, which is copied.
        num_layers: Number of copies.
        norm: Norm after the last layer.
        attention: Name in `reluformer.ATTENTIONS`. None keeps the attention of a layer of this
            module, and gives a layer of torch the recommended one.
        attention_options: Options of the attention and of `AttentionCore`.
    """

    def __init__(
        self,
        decoder_layer: nn.TransformerDecoderLayer,
        num_layers: int,
        norm: nn.Module | None = None,
        *,
        attention: str | None = None,
        attention_options: Options = None,
    ) -> None:
        super().__init__(decoder_layer, num_layers, norm)
        convert_attentions(self, attention, attention_options)


class Transformer(nn.Transformer):
    """`torch.nn.Transformer` with another attention than softmax.

    Args:
        attention: Name in `reluformer.ATTENTIONS`, for all attentions; the default is
            `normalised_relu`.
        attention_options: Options of the attention and of `AttentionCore`.

    The other arguments are those of torch, and the initial weights, too.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = functional.relu,
        custom_encoder: nn.Module | None = None,
        custom_decoder: nn.Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attention: str = RECOMMENDED,
        attention_options: Options = None,
    ) -> None:
        with warnings.catch_warnings():
            # torch explains why it will not use nested tensors.
            warnings.filterwarnings("ignore", message="enable_nested_tensor")
            super().__init__(
                d_model,
                nhead,
                num_encoder_layers,
                num_decoder_layers,
                dim_feedforward,
                dropout,
                activation,
                custom_encoder,
                custom_decoder,
                layer_norm_eps,
                batch_first,
                norm_first,
                bias,
                device,
                dtype,
            )
        convert_attentions(self, attention, attention_options)


def convert_attentions(
    model: nn.Module, attention: str | None, options: Options = None
) -> tuple[str, ...]:
    """Give every attention of torch in a model another kind, in place.

    Modules of exactly torch's classes become modules of this package. Encoder layers and encoders
    become theirs, too, so that they do not take torch's fast path.

    Args:
        model: Module of torch, or with modules of torch.
        attention: Name in `reluformer.ATTENTIONS`. None keeps attentions of this package and gives
            those of torch the recommended one.
        options: Options of the attention and of `AttentionCore`.

    Returns:
        Names of the converted attentions.
    """
    converted = []
    for name, module in model.named_modules():
        if type(module) is nn.MultiheadAttention:
            MultiheadAttention.from_torch(module, attention or RECOMMENDED, options)
            converted.append(name)
        elif isinstance(module, MultiheadAttention) and attention is not None:
            module.set_attention(attention, options)
            converted.append(name)
        else:
            avoid_fast_path(module)
    return tuple(converted)


def avoid_fast_path(module: nn.Module) -> None:
    """Turn an encoder or encoder layer of torch into ours, in place; other modules stay."""
    if type(module) is nn.TransformerEncoderLayer:
        module.__class__ = TransformerEncoderLayer
    elif isinstance(module, nn.TransformerEncoder):
        # Subclasses keep their code, and their nested tensors would not be accepted.
        module.use_nested_tensor = False
        if type(module) is nn.TransformerEncoder:
            module.__class__ = TransformerEncoder
