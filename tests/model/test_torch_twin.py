"""With softmax, the model computes what torch.nn.Transformer computes with the same weights."""

import torch
from torch import nn

from reluformer.model import ReLUFormer
from reluformer.model.attention import MultiHeadAttention
from reluformer.model.blocks import AttentionBranch, MemoryBranch
from tests.model.factory import batch, small


def test_with_softmax_the_model_equals_the_transformer_of_torch() -> None:
    torch.manual_seed(0)
    ours = ReLUFormer(small("softmax")).double().eval()
    config, inputs = ours.config, batch()
    theirs = nn.Transformer(
        config.width, config.heads, config.encoder_layers, config.decoder_layers, config.slots,
        dropout=0.0, norm_first=True, batch_first=True,
    ).double().eval()  # fmt: skip
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        copy(ours, theirs)
        source, target = inputs["source"], inputs["target"]
        padding = {
            "src_key_padding_mask": source == config.pad_id,
            "memory_key_padding_mask": source == config.pad_id,
        }
        hidden = theirs(
            ours.embed(source, ours.source_embedding),
            ours.embed(target, ours.target_embedding),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1]).double(),
            **padding,
        )
        torch.testing.assert_close(ours(**inputs).logits, ours.logits(hidden))


def copy(ours: ReLUFormer, theirs: nn.Transformer) -> None:
    for mine, other in zip(ours.encoder, theirs.encoder.layers, strict=True):
        copy_attention(mine.self_attention, other.self_attn, other.norm1)
        copy_memory(mine.memory, other, other.norm2)
    for mine, other in zip(ours.decoder, theirs.decoder.layers, strict=True):
        copy_attention(mine.self_attention, other.self_attn, other.norm1)
        copy_attention(mine.cross_attention, other.multihead_attn, other.norm2)
        copy_memory(mine.memory, other, other.norm3)
    theirs.encoder.norm.load_state_dict(ours.encoder_norm.state_dict())
    theirs.decoder.norm.load_state_dict(ours.decoder_norm.state_dict())


def copy_attention(
    branch: AttentionBranch, theirs: nn.MultiheadAttention, norm: nn.LayerNorm
) -> None:
    ours: MultiHeadAttention = branch.attention
    theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key_value.weight]))
    theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key_value.bias]))
    theirs.out_proj.load_state_dict(ours.out.state_dict())
    norm.load_state_dict(branch.residual.norm.state_dict())


def copy_memory(branch: MemoryBranch, theirs: nn.Module, norm: nn.LayerNorm) -> None:
    theirs.linear1.weight.copy_(branch.memory.keys)
    theirs.linear2.weight.copy_(branch.memory.values.T)
    theirs.linear1.bias.zero_()
    theirs.linear2.bias.zero_()
    norm.load_state_dict(branch.residual.norm.state_dict())
