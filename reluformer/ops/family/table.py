"""The family of attentions by name. A new one is a function in `family/` and a row here."""

from reluformer.errors import UserError
from reluformer.ops.definition import Attention
from reluformer.ops.family import elementwise, output_transforms, rectified, row_normalised, sparse

_ROWS = (
    Attention(
        "relu",
        "ReLU(s - threshold)^power / (gamma (n/2)^length_exponent)",
        "Shen et al. 2023, A Study on ReLU and Softmax in Transformer, arXiv 2302.06461",
        rule=rectified.relu,
        learned={"gamma": "head", "threshold": "head"},
    ),
    Attention(
        "normalised_relu",
        "r / (sum r + 1e-4), r = ReLU(s - threshold)^power / (gamma (n/2)^length_exponent)",
        "this library, after Shen et al. 2023, arXiv 2302.06461: docs/training-relu-attention.md",
        rule=rectified.normalised_relu,
        learned={"gamma": "head", "threshold": "head"},
    ),
    Attention(
        "softmax",
        "exp(s) / sum exp(s)",
        "Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762",
        weigh=row_normalised.softmax,
    ),
    Attention(
        "relu_n",
        "ReLU(s) / n^length_exponent",
        "Wortsman et al. 2023, Replacing Softmax with ReLU in Vision Transformers, "
        "arXiv 2309.08586",
        rule=rectified.relu_n,
    ),
    Attention(
        "rela",
        "RMSNorm(ReLU(s) V) sigmoid(gate ReLU(s) V)",
        "Zhang et al. 2021, Sparse Attention with Linear Units, arXiv 2104.07012",
        rule=rectified.rela,
        output_transform=output_transforms.over_heads,
        learned={"gain": "width", "gate": "width"},
    ),
    Attention(
        "squared_relu",
        "ReLU(s)^2 / n",
        "Hua et al. 2022, Transformer Quality in Linear Time, arXiv 2202.10447 (text)",
        rule=rectified.squared_relu,
    ),
    Attention(
        "squared_relu_n2",
        "ReLU(s / n)^2",
        "Hua et al. 2022, Transformer Quality in Linear Time, arXiv 2202.10447 (appendix)",
        rule=rectified.squared_relu_n2,
    ),
    Attention(
        "leaky_relu",
        "LeakyReLU(s) / (n/2)^length_exponent",
        "LeakyReLU attention, 2023 (scaling unconfirmed)",
        rule=rectified.leaky_relu,
    ),
    Attention(
        "cosine_relu",
        "ReLU(t cos(q, k))",
        "FD4MM, 2024, there over channels",
        rule=rectified.cosine_relu,
        cosine=True,
        learned={"temperature": "head"},
    ),
    Attention(
        "tra",
        "RMSNorm(ReLU(cos(q, k) - tau)^power V), tau = beta sqrt(2 ln(n / kappa) / D)",
        "Threshold rectified attention, ACL 2026",
        weigh=rectified.tra,
        output_transform=output_transforms.in_head,
        cosine=True,
        learned={"gain": "width"},
    ),
    Attention(
        "tda",
        "RMSNorm((tra(s1) - lambda tra(s2)) V)",
        "Threshold differential attention, ACL 2026",
        weigh=rectified.tda,
        output_transform=output_transforms.in_head,
        cosine=True,
        halves=True,
        learned={"gain": "width", "lam": "head"},
    ),
    Attention(
        "sparsemax",
        "max(s - tau, 0), sum 1",
        "Martins and Astudillo 2016, From Softmax to Sparsemax, arXiv 1602.02068",
        weigh=sparse.sparsemax,
    ),
    Attention(
        "entmax15",
        "max(s/2 - tau, 0)^2, sum 1",
        "Peters et al. 2019, Sparse Sequence-to-Sequence Models, arXiv 1905.05702",
        weigh=sparse.entmax15,
    ),
    Attention(
        "entmax",
        "max((alpha - 1) s - tau, 0)^(1 / (alpha - 1)), sum 1",
        "Peters et al. 2019, Sparse Sequence-to-Sequence Models, arXiv 1905.05702 (fixed alpha; "
        "models do not learn it as in Correia et al. 2019, arXiv 1909.00015)",
        weigh=sparse.entmax,
    ),
    Attention(
        "sigmoid",
        "sigmoid(s - ln n), or sigmoid(s + offset)",
        "Ramapuram et al. 2024, Theory, Analysis, and Best Practices for Sigmoid Self-Attention, "
        "arXiv 2409.04431",
        weigh=elementwise.sigmoid,
    ),
    Attention(
        "softmax1",
        "exp(s) / (1 + sum exp(s))",
        "Miller 2023, Attention Is Off By One",
        weigh=row_normalised.softmax1,
    ),
    Attention(
        "sink",
        "exp(s) / (exp(sink) + sum exp(s))",
        "OpenAI 2025, gpt-oss model card",
        weigh=row_normalised.sink,
        learned={"sink": "head"},
    ),
    Attention(
        "ssmax",
        "softmax(t ln(n) s)",
        "Nakanishi 2025, Scalable-Softmax Is Superior for Attention, arXiv 2501.19399",
        weigh=row_normalised.ssmax,
        learned={"temperature": "head"},
    ),
    Attention(
        "softpick",
        "ReLU(e^s - 1) / (sum |e^s - 1| + epsilon)",
        "Zuhri et al. 2025, Softpick, arXiv 2504.20966",
        weigh=row_normalised.softpick,
    ),
    Attention(
        "lssa",
        "softplus(ln D ln n cos(q, k)) / row sum",
        "Length-scaled softplus attention, 2025",
        weigh=row_normalised.lssa,
        cosine=True,
    ),
    Attention(
        "lssar",
        "ReLU(n lssa - 1)^power / row sum",
        "Length-scaled softplus attention with re-weighting, ICML 2026",
        weigh=row_normalised.lssar,
        cosine=True,
    ),
    Attention(
        "differential",
        "RMSNorm((softmax(s1) - lambda softmax(s2)) V) (1 - lambda_init)",
        "Ye et al. 2024, Differential Transformer, arXiv 2410.05258 (there lambda is a difference "
        "of exponentials and depends on the depth; here it is a number per head)",
        weigh=row_normalised.differential,
        output_transform=output_transforms.differential,
        halves=True,
        learned={"gain": "width", "lam": "head"},
    ),
    Attention(
        "cog",
        "sign(s) softmax(|s|)",
        "Lv et al. 2024, More Expressive Attention with Negative Weights, arXiv 2411.07176",
        weigh=row_normalised.cog,
    ),
    Attention(
        "self_adjust",
        "s softmax(s)",
        "Zheng et al. 2025, Self-Adjust Softmax, EMNLP 2025",
        weigh=row_normalised.self_adjust,
    ),
    Attention(
        "self_adjust_normalised",
        "(s - min(s_min, 0)) / (max(s_max, 0) - min(s_min, 0)) softmax(s)",
        "Zheng et al. 2025, Self-Adjust Softmax, EMNLP 2025 (normalised form)",
        weigh=row_normalised.self_adjust_normalised,
    ),
    Attention(
        "polynomial",
        "s^power / sqrt(n)",
        "Saratchandran et al. 2024, Rethinking Softmax: Polynomial Activations, arXiv 2410.18613",
        weigh=elementwise.polynomial,
    ),
    Attention(
        "laplace",
        "(1 + erf((s/n - mu) / (sigma sqrt 2))) / 2",
        "Ma et al. 2022, Mega: Moving Average Equipped Gated Attention, arXiv 2209.10655",
        weigh=elementwise.laplace,
    ),
    Attention(
        "silu",
        "SiLU(s) / n",
        "Zhai et al. 2024, Actions Speak Louder than Words (HSTU), arXiv 2402.17152",
        weigh=elementwise.silu_n,
    ),
    Attention(
        "stick_breaking",
        "sigmoid(s_j) prod_{k > j} (1 - sigmoid(s_k))",
        "Tan et al. 2024, Stick-breaking Attention, arXiv 2410.17980 (there a query does not see "
        "its own key; here it does)",
        weigh=elementwise.stick_breaking,
        ordered=True,
    ),
    Attention(
        "top_k",
        "softmax over the `keep` largest scores",
        "Zhao et al. 2019, Explicit Sparse Transformer, arXiv 1912.11637",
        weigh=row_normalised.top_k,
    ),
    Attention(
        "assa",
        "a softmax(s) + b ReLU(s)^2, (a, b) = softmax(mix)",
        "Zhou et al. 2024, Adapt or Perish: Adaptive Sparse Transformer, CVPR 2024",
        weigh=row_normalised.assa,
        learned={"mix": "pair"},
    ),
    Attention(
        "gated",
        "softmax(s) V sigmoid(gate)",
        "Qiu et al. 2025, Gated Attention for Large Language Models, arXiv 2505.06708",
        weigh=row_normalised.softmax,
        output_transform=output_transforms.gated,
        learned={"gate": "token"},
    ),
)

ATTENTIONS: dict[str, Attention] = {row.name: row for row in _ROWS}
"""Definition of every attention by name; `reluformer.attention` runs them."""


def lookup(name: str) -> Attention:
    """The attention called `name`."""
    if not isinstance(name, str) or name not in ATTENTIONS:
        raise UserError(f"unknown attention {name!r}; known: {', '.join(sorted(ATTENTIONS))}")
    return ATTENTIONS[name]
