"""Tasks as the native library reads them, and the errors it reports."""

from array import array

import torch

from reluformer.config.search import SearchConfig
from reluformer.errors import UserError
from reluformer.translation.native import layout
from reluformer.translation.native.model import NativeModel
from reluformer.translation.search.task import Task

_NOT_FINITE, _OUT_OF_MEMORY = -1, -2


def describe_task(
    model: NativeModel, task: Task, config: SearchConfig, best: int
) -> tuple[layout.Task, "list[array[int]]"]:
    """The task as the library reads it, and the arrays that it points to."""
    end, vocabulary = model.config.eos_id, model.config.vocabulary
    tokens = array("i", (token for source in task.sources for token in (*source, end)))
    banned = array("i", (model.config.pad_id, model.config.bos_id, *task.banned))
    for token in (*tokens, *banned):
        if not 0 <= token < vocabulary:
            raise UserError(f"token ids must be below vocabulary {vocabulary}, got {token}")
    arrays = [
        tokens,
        array("q", (len(source) + 1 for source in task.sources)),
        array("q", task.shortest),
        array("q", task.longest),
        banned,
    ]
    described = layout.Task(
        *(values.buffer_info()[0] for values in arrays),
        sentences=len(task.sources),
        beams=config.beam,
        banned_count=len(banned),
        best=best,
        threads=torch.get_num_threads(),
        length_penalty=config.length_penalty,
    )
    return described, arrays


def check_status(status: int) -> None:
    """Raise the error of a negative status."""
    if status == _NOT_FINITE:
        raise UserError("the model's output is not finite; its weights are damaged")
    if status == _OUT_OF_MEMORY:
        raise MemoryError("not enough memory for the search")


def check_handle(handle: int | None) -> None:
    """Raise MemoryError if an object of the library could not be created."""
    check_status(0 if handle else _OUT_OF_MEMORY)
