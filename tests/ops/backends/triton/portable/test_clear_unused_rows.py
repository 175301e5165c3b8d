"""Outputs of packed calls: rows of no sequence are zero, other rows are not touched."""

import pytest
import torch

from reluformer.ops.backends.triton import layout, run_packed

GPU = torch.cuda.is_available()
on_cpu = pytest.mark.skipif(GPU, reason="the interpreter is off")
on_gpu = (pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU"))


@pytest.mark.parametrize("ends", [(0, 5, 70), (3, 3, 64), (0, 130), (0, 0), (130, 130)])
@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_gpu)]
)
def test_rows_of_no_sequence_are_zero(
    ends: tuple[int, ...], rows_first: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, heads, width = 130, 3, 24
    like = torch.empty(1, heads, tokens, width, device=device)
    if rows_first:
        like = torch.empty(1, tokens, heads, width, device=device).transpose(1, 2)
    monkeypatch.setattr(
        run_packed,
        "empty_heads",
        lambda *args: layout.empty_heads(*args).fill_(float("nan")),
    )
    cu = torch.tensor(ends, dtype=torch.int32, device=device)
    out = run_packed.empty_packed_heads(like, 20, cu)
    assert out.shape == (1, heads, tokens, 20) and (out.stride(1) < out.stride(2)) == rows_first
    at = torch.arange(tokens, device=device)
    outside = (at < ends[0]) | (at >= ends[-1])
    assert (out[:, :, outside] == 0).all()
    assert out[:, :, ~outside].isnan().all()
    assert run_packed.empty_packed_heads(like, 20, None).isnan().all()
