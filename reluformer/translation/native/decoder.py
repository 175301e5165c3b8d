"""The native decoder for searches that decide in Python, such as sampling."""

import ctypes
import weakref

import torch
from torch import Tensor

from reluformer.config.search import SearchConfig
from reluformer.translation.native import layout
from reluformer.translation.native.model import NativeModel
from reluformer.translation.native.task import check_handle, check_status, describe_task
from reluformer.translation.search.task import StepDecoder, Task


class NativeDecoder(StepDecoder):
    """A decoder with one row for each sentence, whose steps run in the native library."""

    def __init__(self, model: NativeModel, task: Task) -> None:
        super().__init__(model.config, task, 1, torch.device("cpu"))
        self.model = model
        described, _owners = describe_task(model, task, SearchConfig(beam=1), best=1)
        self.handle = model.library.decoder_new(model.handle, ctypes.byref(described))
        check_handle(self.handle)
        # The native decoder refers to the model.
        weakref.finalize(self, _free, model, self.handle)
        self.parents = self.indices
        """Row of the previous step that each row continues, [B]."""

    def next_logits(self) -> tuple[Tensor, Tensor]:
        """Logits after the last tokens, which the cache then holds."""
        count = len(self)
        columns = (self.indices.tolist(), self.last.flatten().tolist(), self.parents.tolist())
        rows = (layout.Row * count)(*(layout.Row(*row) for row in zip(*columns, strict=True)))
        sizes = ((count, self.config.vocabulary), (count, 1))
        logits, total = (torch.empty(size, dtype=torch.float32, device="cpu") for size in sizes)
        step = self.model.library.decoder_step
        check_status(step(self.handle, rows, count, logits.data_ptr(), total.data_ptr()))
        self.parents = torch.arange(count, device="cpu")
        return logits, total

    def keep(self, sentences: Tensor) -> None:
        """Drop all sentences but those with the given indices."""
        super().keep(sentences)
        self.parents = self.parents[sentences]


def _free(model: NativeModel, handle: int) -> None:
    model.library.decoder_free(handle)
