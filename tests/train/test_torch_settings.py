"""Settings of the process during a training."""

import os
import platform
import resource

import pytest
import torch

from reluformer.config.train import TrainConfig
from reluformer.train.torch_settings import torch_settings

CPU = torch.device("cpu")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no mallopt")
def test_freed_memory_is_used_again() -> None:
    def page_faults() -> int:
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            torch.ones(2**24)  # 64 MiB: 16,384 pages
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

    with torch_settings(TrainConfig(), CPU):
        page_faults()
        assert page_faults() < 16384
    assert page_faults() > 16384


def test_a_gpu_gets_the_faster_gradients_of_layer_norms_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "TORCHINDUCTOR_MIX_ORDER_REDUCTION"
    monkeypatch.setenv(name, "1")
    with torch_settings(TrainConfig(), torch.device("cuda")):
        assert os.environ[name] == "1"
    monkeypatch.delenv(name)
    with torch_settings(TrainConfig(), torch.device("cpu")):
        assert name not in os.environ
    with torch_settings(TrainConfig(), torch.device("cuda")):
        assert os.environ[name] == "0"
