"""An attention layer for the vision transformers of timm.

    model = timm.create_model("vit_small_patch16_224", attn_layer=reluformer.nn.timm.Attention)

`replace_attention` converts existing models, also those with other attention classes.
"""

from typing import Any

from timm import layers
from torch import nn

from reluformer.nn.core import RECOMMENDED
from reluformer.nn.sdpa import attention_layer

Attention = attention_layer(layers.Attention)
"""`timm.layers.Attention` with the recommended attention, for `attn_layer`."""


def attn_layer(attention: str = RECOMMENDED, **options: Any) -> type[nn.Module]:
    """`timm.layers.Attention` with an attention of the family, for the argument `attn_layer`.

    Args:
        attention: Name in `reluformer.ATTENTIONS`; the default is `normalised_relu`.
        **options: Options of the attention and of `AttentionCore`.
    """
    return attention_layer(layers.Attention, attention, options)
