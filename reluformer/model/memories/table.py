"""All kinds of memory by name. A new kind is a row here, and a selector if none fits."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from reluformer.errors import UserError
from reluformer.model.memories.definition import Selector
from reluformer.model.memories.dense import AllSlots, TopK, pattention
from reluformer.model.memories.experts import Experts
from reluformer.model.memories.persistent import PerHead
from reluformer.model.memories.product_keys import ProductKeys
from reluformer.ops.family import elementwise, row_normalised
from reluformer.ops.memory import Scores, Weigh
from reluformer.ops.rule import RELU, Rectified


@dataclass(frozen=True)
class Memory:
    """One kind of memory: weight function, slot selection, gate and output norm."""

    name: str
    formula: str
    paper: str
    weigh: Weigh
    """Function from scores to weights, of the same family as those of the attentions."""
    selector: type[Selector] = AllSlots
    """Selects the slots that a query reads; its fields are the options of this kind."""
    gate: bool = False
    """Whether weights are multiplied by x G^T, with a second table of keys G."""
    output_norm: type[nn.LayerNorm] | None = None
    """Norm of the output, before it is added to the residual stream."""
    by_row: bool = False
    """Whether weights depend on the whole row; they are then computed in float32 at least."""
    unit_values: bool = False
    """Whether values start with standard deviation 1, because the weights of a row sum to 1.

    With n weights of about 1/n the output then starts with variance e/n. With n^-1/2, the start of
    unnormalised kinds, it would be e/n^2: below 1e-5 from n = 500 on, which is lost in the residual
    stream and under the epsilon of a LayerNorm. The paper compares ReLU and softmax memories whose
    values start alike; set `value_std` of `KeyValueMemory` for that comparison.
    """

    @property
    def weights(self) -> Weigh:
        """Weight function, in float32 at least if weights depend on the whole row."""
        return self._precisely if self.by_row else self.weigh

    def _precisely(self, scores: Scores) -> Tensor:
        precise = scores.values.to(torch.promote_types(scores.values.dtype, torch.float32))
        return self.weigh(Scores(precise, scores.visible, scores.width))

    def select_with(self, options: dict[str, Any]) -> Selector:
        """Selector of this kind with the given options.

        Raises:
            UserError: The kind has no such option.
        """
        known = [option.name for option in fields(self.selector)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise UserError(
                f"{self.name} memory has no option {unknown[0]!r}; "
                f"its options: {', '.join(known) or 'none'}"
            )
        return self.selector(**options)


_SHEN = "Shen et al. 2023, A Study on ReLU and Softmax in Transformer, arXiv 2302.06461"
_SHAZEER = "Shazeer 2020, GLU Variants Improve Transformer, arXiv 2002.05202"
_CSORDAS = (
    "Csordas et al. 2023, Approximating Two-Layer Feedforward Networks for Efficient Transformers, "
    "arXiv 2310.10837"
)

_ROWS = (
    Memory("relu", "ReLU(x K^T) V", _SHEN, RELU),
    Memory(
        "softmax",
        "softmax(x K^T) V",
        _SHEN,
        row_normalised.softmax,
        by_row=True,
        unit_values=True,
    ),
    Memory(
        "softmax_ln",
        "LayerNorm(softmax(x K^T) V)",
        _SHEN,
        row_normalised.softmax,
        output_norm=nn.LayerNorm,
        by_row=True,
        unit_values=True,
    ),
    Memory(
        "gelu",
        "GELU(x K^T) V",
        "Hendrycks and Gimpel 2016, Gaussian Error Linear Units, arXiv 1606.08415",
        elementwise.gelu,
    ),
    Memory(
        "squared_relu",
        "ReLU(x K^T)^2 V",
        "So et al. 2021, Primer: Searching for Efficient Transformers, arXiv 2109.08668",
        Rectified(length_exponent=0.0, power=2),
    ),
    Memory("reglu", "(ReLU(x K^T) * x G^T) V", _SHAZEER, RELU, gate=True),
    Memory("swiglu", "(SiLU(x K^T) * x G^T) V", _SHAZEER, elementwise.silu, gate=True),
    Memory("top_k", "the k largest of ReLU(x K^T), times V", _CSORDAS, RELU, TopK),
    Memory(
        "product_key_softmax",
        "sum over heads of softmax(the k largest of q K^T) V, K = {[a_i, b_j]}, q = W x",
        "Lample et al. 2019, Large Memory Layers with Product Keys, arXiv 1907.05242",
        row_normalised.softmax,
        ProductKeys,
        by_row=True,
        unit_values=True,
    ),
    Memory(
        "product_key_relu",
        "sum over heads of ReLU(the k largest of q K^T) V, K = {[a_i, b_j]}, q = W x",
        _CSORDAS,
        RELU,
        ProductKeys,
    ),
    Memory(
        "sigma_moe",
        "sum over the k largest e of sigmoid(x E^T)_e ReLU(x K_e^T) V_e",
        _CSORDAS,
        RELU,
        Experts,
    ),
    Memory(
        "pattention",
        "GELU(s sqrt(n) / |s|) V, s = x K^T",
        "Wang et al. 2024, TokenFormer: Rethinking Transformer Scaling, arXiv 2410.23168",
        pattention,
        by_row=True,
    ),
    Memory(
        "persistent",
        "softmax(x_h K_h^T / sqrt(D)) V_h, heads h side by side",
        "Sukhbaatar et al. 2019, Augmenting Self-attention with Persistent Memory, "
        "arXiv 1907.01470",
        row_normalised.softmax,
        PerHead,
        by_row=True,
    ),
)

MEMORIES: dict[str, Memory] = {row.name: row for row in _ROWS}
"""All kinds of memory by name."""


def lookup(kind: str) -> Memory:
    """The row of `MEMORIES` with name `kind`; UserError if there is none."""
    if kind not in MEMORIES:
        raise UserError(f"memory must be one of {', '.join(sorted(MEMORIES))}, got {kind!r}")
    return MEMORIES[kind]
