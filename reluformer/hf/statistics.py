"""Statistics of the weights of a transformers model in training."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reluformer.model.records import AttentionRecord
from reluformer.model.recording import recorded_stats, select_rows
from reluformer.ops.api import attend
from reluformer.ops.call import Call
from reluformer.ops.visibility import Visibility

if TYPE_CHECKING:
    from reluformer.hf.layers import LayerAttention

SAMPLED_ROWS = 64
"""Number of query rows of each sequence whose weights are computed."""


@torch.no_grad()
def record(
    layer: "LayerAttention",
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    scale: float | None,
    queries: Tensor | None,
) -> None:
    """Append the statistics of a sample of rows to `layer.records`.

    Args:
        layer: The attention.
        query: [B, H, Tq, D].
        key: [B, Hkv, Tk, D].
        visibility: Visible keys.
        scale: Factor on the scores; None is the attention's default.
        queries: Bool [B, Tq], False for padding; None if all rows count.
    """
    assert layer.records is not None
    count = query.shape[2]
    rows = torch.arange(0, count, -(-count // SAMPLED_ROWS), device=query.device)
    # Spread over the sequence, and the last row, which sees most keys.
    rows = count - 1 - rows
    scale = layer.row.default_scale(query.shape[-1]) if scale is None else scale
    call = Call(query, key, key[..., :0], visibility, scale, return_stats=True)
    names = ("gain", "gate")
    options = {name: value for name, value in layer.options().items() if name not in names}
    stats = recorded_stats(attend(layer.row, select_rows(call, rows), options, "reference"))
    assert stats is not None
    valid = torch.ones((1, 1, 1), dtype=torch.bool, device=query.device)
    if queries is not None:
        valid = queries[:, None, rows]
    layer.records.append(AttentionRecord("layer", len(layer.records), stats, valid, None))
