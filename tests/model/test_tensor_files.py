"""Files of tensors that are read one at a time."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reluformer.errors import UserError
from reluformer.model.tensor_files import TensorFile

MEGABYTE = 2**20


def mapped_bytes() -> int:
    """Bytes of files in this process's memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssFile"].split()[0]) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_tensors_that_were_read_leave_memory(tmp_path: Path) -> None:
    save_file({f"t{i}": torch.full((MEGABYTE,), float(i)) for i in range(12)}, tmp_path / "a")
    file = TensorFile(tmp_path / "a")
    before = mapped_bytes()
    for i in range(12):
        assert file[f"t{i}"].sum() == i * MEGABYTE
        assert mapped_bytes() - before < 12 * MEGABYTE
    assert sorted(file) == sorted(f"t{i}" for i in range(12)) and len(file) == 12


def test_a_tensor_outlives_the_mapping(tmp_path: Path) -> None:
    save_file({f"t{i}": torch.full((MEGABYTE,), float(i)) for i in range(4)}, tmp_path / "a")
    file = TensorFile(tmp_path / "a")
    tensors = [file[f"t{i}"] for i in range(4)]
    del file
    assert [int(tensor.max()) for tensor in tensors] == [0, 1, 2, 3]


def test_a_name_that_is_not_in_the_file(tmp_path: Path) -> None:
    save_file({"t": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(KeyError):
        TensorFile(tmp_path / "a")["u"]


def test_a_file_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    save_file({"t": torch.ones(2)}, tmp_path / "a")
    file = TensorFile(tmp_path / "a")
    save_file({"t": torch.ones(3)}, tmp_path / "b")
    (tmp_path / "b").replace(tmp_path / "a")
    with pytest.raises(UserError, match="changed while it was read"):
        file["t"]
