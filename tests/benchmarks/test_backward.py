"""The benchmark of the backward kernels; timing needs a GPU."""

import pytest

pytest.importorskip("triton")

from benchmarks import backward as benchmark
from reluformer.ops.backends.triton import tuning


@pytest.mark.parametrize(
    ("variant", "wanted"),
    [
        ("default", tuning.Override()),
        ("plain", tuning.Override(hopper=False, gradient_bytes=0)),
        ("specialised, stored", tuning.Override(hopper=True, gradient_bytes=512 << 20)),
    ],
)
def test_choices_of_a_variant(
    variant: str, wanted: tuning.Override, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        benchmark.run_backward, "backward", lambda *args, **options: (tuning.current(),)
    )
    call = benchmark.make(64, causal=False, n=16, models=False, tokens=16, total=64)
    assert benchmark.backward(call, variant) == (wanted,)
