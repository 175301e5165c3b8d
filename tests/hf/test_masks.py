"""The mask function: the masks of transformers, as lengths, windows and packing."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402  # after the check for the package

from reluformer.hf.masks import CompactMask, attention_mask  # noqa: E402

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "packed": masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(SEGMENTS),
    ),
    "bidirectional": masking_utils.bidirectional_mask_function,
}
PADDINGS = {
    "none": None,
    "right": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool(),
    "left": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool(),
    "inside": torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0]]).bool(),
}
# q_length, kv_length, q_offset, kv_offset: prompt, one token, chunk, static cache, window cache.
SIZES = [(5, 5, 0, 0), (1, 5, 4, 0), (2, 5, 3, 0), (3, 5, 0, 0), (2, 5, 1, 0), (2, 3, 3, 2)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_masks_are_those_of_sdpa(function: str, padding: str, size: tuple[int, ...]) -> None:
    if function == "packed" and size != SIZES[0]:
        pytest.skip("packed sequences have no cache")
    arguments = {
        "q_offset": size[2],
        "kv_offset": size[3],
        "mask_function": FUNCTIONS[function],
        "attention_mask": PADDINGS[padding],
        "allow_is_causal_skip": False,
    }
    expected = masking_utils.sdpa_mask(2, *size[:2], **arguments)
    found = attention_mask(2, *size[:2], **arguments)
    assert isinstance(found, CompactMask) and found.shape == expected.shape
    assert torch.equal(found.clone(), expected)
    # Slices and combinations are those of the plain mask.
    assert type(found[:, :, -1:]) is Tensor
    assert torch.equal(
        found[:, :, -1:] & expected[:, :, :1], expected[:, :, -1:] & expected[:, :, :1]
    )


@pytest.mark.parametrize(
    ("function", "padding", "rules"),
    [
        ("causal", "right", {"causal": True, "lengths": [5, 3]}),
        ("window", "right", {"causal": True, "lengths": [5, 3], "window": 3}),
        ("bidirectional", "right", {"lengths": [5, 3]}),
        ("window", "none", {"causal": True, "window": 3}),
        ("causal", "left", {"causal": True, "mask": [2, 1, 1, 5]}),
    ],
)
def test_the_rules_that_the_fast_kernels_take(function: str, padding: str, rules: object) -> None:
    mask = attention_mask(
        2, 5, 5, mask_function=FUNCTIONS[function], attention_mask=PADDINGS[padding]
    )
    assert isinstance(mask, CompactMask)
    visibility = mask.visibility
    found = {
        "causal": visibility.causal or None,
        "lengths": None if visibility.key_lengths is None else visibility.key_lengths.tolist(),
        "window": visibility.window,
        "mask": None if visibility.mask is None else list(visibility.mask.shape),
    }
    assert {key: value for key, value in found.items() if value is not None} == rules


def test_packed_sequences_have_boundaries() -> None:
    mask = attention_mask(2, 5, 5, mask_function=FUNCTIONS["packed"], allow_is_causal_skip=False)
    assert isinstance(mask, CompactMask) and mask.is_packed
    ends, longest = mask.boundaries()
    assert ends.tolist() == [0, 3, 5, 6, 10] and longest == 5


@pytest.mark.parametrize("padding", [None, torch.ones(2, 5, dtype=torch.bool)])
def test_no_mask_where_causality_alone_or_nothing_hides_keys(padding: Tensor | None) -> None:
    causal, every = FUNCTIONS["causal"], FUNCTIONS["bidirectional"]
    assert attention_mask(2, 5, 5, mask_function=causal, attention_mask=padding) is None
    one = attention_mask(2, 1, 5, 4, mask_function=causal, attention_mask=padding)
    assert one is None
    both = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    assert attention_mask(2, 3, 5, mask_function=every, attention_mask=padding, **both) is None


def test_other_predicates_give_a_plain_mask() -> None:
    def predicate(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (row + key) % 2 == 0

    found = attention_mask(2, 5, 5, mask_function=predicate)
    expected = masking_utils.sdpa_mask(2, 5, 5, mask_function=predicate, allow_is_causal_skip=False)
    assert type(found) is Tensor and torch.equal(found, expected)


def test_queries_that_are_padding() -> None:
    for padding in ("right", "left"):
        mask = attention_mask(2, 5, 5, attention_mask=PADDINGS[padding])
        assert isinstance(mask, CompactMask)
        assert torch.equal(mask.queries(is_cross=False), PADDINGS[padding])
        encoder = attention_mask(
            2, 5, 5, mask_function=FUNCTIONS["bidirectional"], attention_mask=PADDINGS[padding]
        )
        assert torch.equal(encoder.queries(is_cross=False), PADDINGS[padding])
        assert encoder.queries(is_cross=True) is None
