"""The implementations that take part: backends of this package and kernels of torch."""

from functools import partial

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reluformer.bench.cases import Case
from reluformer.bench.contestant import Contestant
from reluformer.bench.features import features
from reluformer.bench.flex import flex_contestants
from reluformer.bench.rules import rules
from reluformer.ops import attention
from reluformer.ops.backends.registry import BACKENDS
from reluformer.products import fast_products, onednn_is_exact

# SDPA backends that compute softmax attention without materialising its weights.
_SDPA = {
    "SDPA-flash": SDPBackend.FLASH_ATTENTION,
    "SDPA-cuDNN": SDPBackend.CUDNN_ATTENTION,
}

# Largest number of scores of a case for eager attention, and for eager attention that searches its
# threshold by thirty passes over the scores.
_EAGER_LIMIT = {"cuda": 1 << 29, "cpu": 1 << 25}
_SEARCH_LIMIT = {"cuda": 1 << 28, "cpu": 1 << 22}
_SEARCHED = ("sparsemax", "entmax15")


def contestants(case: Case) -> dict[str, Contestant]:
    """Contestants of a case by name; those that cannot run carry the reason."""
    if case.group == "features":
        return features(case)
    pairs = [("relu", impl) for impl in BACKENDS if impl != "sdpa"]
    pairs += [("softmax", "sdpa")]
    pairs += [(kind, "reference") for kind in ("softmax", *_SEARCHED)]
    entrants = [_backend(case, kind, impl) for kind, impl in pairs]
    for name, backend in _SDPA.items():
        entrants.append(Contestant(name, "softmax", partial(_sdpa, backend, case.causal), case))
    if case.device == "cpu" and case.dtype == "float32":
        # Up to twice as fast as MKL on AMD processors, and slower where there are few rows.
        run, context = (
            partial(_sdpa, _SDPA["SDPA-flash"], case.causal),
            partial(fast_products, "cpu"),
        )
        reason = None if onednn_is_exact() else "oneDNN would round products to bfloat16 here"
        entrants.append(
            Contestant("SDPA-oneDNN", "softmax", run, case, context=context, absent=reason)
        )
    entrants += flex_contestants(case)
    if case.group == "dense":
        entrants += rules(case)
    return {contestant.name: contestant for contestant in entrants}


def _backend(case: Case, kind: str, impl: str) -> Contestant:
    """A backend of this package."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (attention(kind, q, k, v, causal=case.causal, impl=impl),)

    reason = None
    limit = (_SEARCH_LIMIT if kind in _SEARCHED else _EAGER_LIMIT)[case.device]
    if impl == "reference" and case.scores > limit:
        reason = "its score tensors would be too large or slow"
    return Contestant(
        f"{kind} {impl}", kind, run, case, is_compiled=impl == "triton", absent=reason
    )


def _sdpa(backend: SDPBackend, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    is_grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(backend):
        return (scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=is_grouped),)
