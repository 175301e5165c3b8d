"""Drop-in layers: attention of the family in place of softmax attention."""

from reluformer.nn.core import AttentionCore, set_row_loss_scale

__all__ = ["AttentionCore", "set_row_loss_scale"]
