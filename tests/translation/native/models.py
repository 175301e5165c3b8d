"""Random models of every variant that the native library supports."""

from typing import Any

import torch

from reluformer.model import AttentionConfig, ModelConfig, ReLUFormer

# Every attention keeps its gamma, so that models need no calibration.
_DEFAULT = {"row_sum_init": None}

ATTENTIONS: dict[str, AttentionConfig] = {
    "default": AttentionConfig(**_DEFAULT),
    "paper": AttentionConfig.paper(),
    "power 2": AttentionConfig(power=2, gamma="head", row_normalise=None, **_DEFAULT),
    "power 8": AttentionConfig(power=8, gamma="fixed", gamma_init=3.0, **_DEFAULT),
    "fixed threshold": AttentionConfig(power=1, threshold="fixed", threshold_init=0.1, **_DEFAULT),
    "one gamma": AttentionConfig.paper(gamma="model"),
    "norms": AttentionConfig(qk_norm=True, output_norm=True, **_DEFAULT),
    "softmax": AttentionConfig(kind="softmax"),
    "softmax with norms": AttentionConfig(kind="softmax", qk_norm=True),
    "relu_n": AttentionConfig(kind="relu_n"),
    "squared_relu": AttentionConfig(kind="squared_relu"),
    "squared_relu_n2": AttentionConfig(kind="squared_relu_n2"),
}

SHAPES: dict[str, dict[str, Any]] = {
    "post-norm": {"norm": "post"},
    "rotary": {"positions": "rotary"},
    "untied": {"tie_embeddings": False},
    "softmax memory": {"memory": "softmax"},
    "softmax_ln memory": {"memory": "softmax_ln", "memory_options": {"temperature": 0.5}},
    "squared memory": {"memory": "squared_relu", "memory_options": {"bias": True}},
    "biases": {"memory_options": {"bias": True, "temperature": 2.0}, "norm": "post"},
    "shared heads": {"heads": 4, "kv_heads": 2, "positions": "rotary"},
    "wide heads": {"width": 136, "heads": 2, "kv_heads": 1},
    "odd sizes": {"width": 21, "heads": 3, "slots": 37},
    "no encoder": {"encoder_layers": 0},
    "mixed": {
        "encoder_attention": ATTENTIONS["softmax"],
        "decoder_attention": ATTENTIONS["paper"],
        "cross_attention": ATTENTIONS["power 2"],
    },
}


def random_model(
    attention: str = "default", vocabulary: int = 90, seed: int = 0, **settings: Any
) -> ReLUFormer:
    """A model with random gains, biases, thresholds and gammas."""
    torch.manual_seed(seed)
    defaults = {"width": 32, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "slots": 48}
    config = ModelConfig(
        vocabulary=vocabulary, attention=ATTENTIONS[attention], **{**defaults, **settings}
    )
    model = ReLUFormer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def random_sources(count: int, vocabulary: int = 90, longest: int = 20) -> list[list[int]]:
    """Sources of different lengths, the first of them the longest."""
    lengths = [longest, *torch.randint(1, longest, (count - 1,)).tolist()]
    return [torch.randint(3, vocabulary, (length,)).tolist() for length in lengths]
