"""Drop-in layers: attention of the family in place of softmax attention."""

from reluformer.nn.core import AttentionCore, set_row_loss_scale
from reluformer.nn.multihead import MultiheadAttention
from reluformer.nn.replace import Replacement, replace_attention
from reluformer.nn.transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "AttentionCore",
    "MultiheadAttention",
    "Replacement",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "replace_attention",
    "set_row_loss_scale",
]
