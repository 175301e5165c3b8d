"""Run a Gluon kernel without a GPU: its own source, with threads for partitions of warps.

Every partition is a thread, and everything asynchronous happens as late as it may: a copy into
shared memory leaves NaN until it arrives some time later, a product reads its operands only when it
is waited for, and so does the store of a tile; a load reads when a fence or its user asks for it. A
buffer released too early or read too soon shows as NaN or as wrong numbers; a barrier nobody
arrives at as a deadlock. Layouts mean nothing here.
"""

import importlib
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.ops.backends.triton import instructions

PATIENCE = 20.0
# Seconds that others have after an arrival, one of these each time.
PAUSES = (0.0, 0.0, 1e-3)
_local = threading.local()


class Pointer:
    """Into a tensor, seen flat."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset + offset)


class Descriptor:
    """Tiles of a tensor [B, H, T, D]; zeros past its end, and nothing is written there."""

    def __init__(self, tensor: Tensor, rows: int) -> None:
        self.tensor, self.rows, self.dtype, self.layout = tensor, rows, tensor.dtype, None

    def part(self, at: list[Any]) -> Tensor:
        b, h, row, _ = (int(each) for each in at)
        assert b < self.tensor.shape[0] and h < self.tensor.shape[1]
        return self.tensor[b, h, row : row + self.rows]


class Buffers:
    """Shared memory, or a part of it."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def index(self, at: Any) -> "Buffers":
        return Buffers(self.data[int(at)])

    def reshape(self, shape: list[int]) -> "Buffers":
        return Buffers(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Buffers":
        return Buffers(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int) -> "Buffers":
        return Buffers(self.data.narrow(dim, start, length))

    def load(self, layout: object) -> "Late":
        return Late(self)

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)


class Late:
    """What a buffer is read into: not before it is used, or a fence asks for it."""

    def __init__(self, source: Buffers) -> None:
        self.source, self.dtype = source, source.data.dtype
        self.result: Tensor | None = None
        _local.loads.append(self)

    def make(self) -> Tensor:
        if self.result is None:
            self.result = self.source.data.clone()
        return self.result


class Barrier:
    """Arrivals and bytes that the current phase still waits for, and the phase."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def turn(self) -> None:
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1


class Product:
    """left @ right, added to what was there before; made when it is waited for."""

    def __init__(self, left: Any, right: Buffers, before: Any, use_acc: Any) -> None:
        self.left, self.right, self.before, self.use_acc = left, right, before, use_acc
        self.result: Tensor | None = None

    def make(self) -> None:
        left = self.left.data if isinstance(self.left, Buffers) else _value(self.left)
        self.result = left.float() @ self.right.data.float()
        if bool(self.use_acc):
            self.result = self.result + _value(self.before)


def _value(x: Any) -> Tensor:
    """A tensor, what is loaded, or the result of a product, which must have been waited for."""
    if isinstance(x, Late):
        return x.make()
    if isinstance(x, Product):
        assert x.result is not None, "a result is read before it is there"
        return x.result
    return x  # type: ignore[no-any-return]


class Machine:
    """One program: its memory, its partitions and the copies under way."""

    def __init__(self, program: int, programs: int, seed: int) -> None:
        self.program, self.programs = program, programs
        self.changed = threading.Condition()
        self.random = random.Random(seed)
        self.failures: list[BaseException] = []

    def run(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        threads = [threading.Thread(target=self._part, args=part, daemon=True) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]

    def _part(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        _local.machine, _local.products, _local.stores, _local.loads = self, [], [], []
        try:
            function(*args)
            assert not _local.stores, "a program ends before its stores"
        except BaseException as failure:
            with self.changed:
                self.failures.append(failure)
                self.changed.notify_all()

    def wait(self, bar: Buffers, phase: Any) -> None:
        barrier: Barrier = bar.data[0]
        with self.changed:
            over = self.changed.wait_for(
                lambda: self.failures or barrier.phase % 2 != int(phase), PATIENCE
            )
            assert over and not self.failures, "deadlock, or the end of another partition"

    def arrive(self, bar: Buffers, bytes: int = 0) -> None:
        with self.changed:
            barrier: Barrier = bar.data[0]
            barrier.pending -= 1
            barrier.bytes += bytes
            barrier.turn()
            self.changed.notify_all()
        # Others go first, so that what is given back too early is gone.
        time.sleep(self.random.choice(PAUSES))

    def fetch(self, source: Descriptor, at: list[Any], bar: Buffers, target: Buffers) -> None:
        target.data.fill_(float("nan"))
        part, delay = source.part(at), self.random.choice((0.0, 0.0, 1e-3))

        def copy() -> None:
            time.sleep(delay)
            flat = target.data.view(source.rows, -1)
            flat.zero_()
            flat[: part.shape[0]].copy_(part)
            with self.changed:
                barrier: Barrier = bar.data[0]
                barrier.bytes -= flat.numel() * flat.element_size()
                barrier.turn()
                self.changed.notify_all()

        threading.Thread(target=copy, daemon=True).start()


def _tensors(*values: Any) -> list[Any]:
    return [
        each if isinstance(each, Tensor) else torch.tensor(each) for each in map(_value, values)
    ]


def _load(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
    offset, mask = torch.broadcast_tensors(*_tensors(pointer.offset, mask))
    found = pointer.tensor.view(-1)[torch.where(mask, offset, 0)]
    return found.masked_fill(~mask, other)


def _store(pointer: Pointer, value: Tensor, mask: Any) -> None:
    mask = torch.as_tensor(mask).expand(pointer.offset.shape)
    pointer.tensor.view(-1)[pointer.offset[mask]] = value[mask]


def _allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Buffers:
    if dtype == torch.int64:
        return Buffers([[Barrier()] for _ in range(shape[0])])
    return Buffers(torch.full(shape, float("nan"), dtype=dtype))


def _assembly(code: str, constraints: str, args: list[Any], dtype: Any, **_: Any) -> Any:
    return instructions.run(code, [_value(each) for each in args])


def _product(
    left: Any, right: Buffers, acc: Any, use_acc: Any = True, is_async: bool = False
) -> Any:
    made = Product(left, right, acc, use_acc)
    _local.products.append(made)
    return made


def _await_products(left: int, results: list[Any]) -> Any:
    while len(_local.products) > left:
        _local.products.pop(0).make()
    made = [
        each if isinstance(each, Product) and each.result is None else _value(each)
        for each in results
    ]
    return made[0] if len(made) == 1 else made


def _await_stores(left: int) -> None:
    while len(_local.stores) > left:
        target, at, source = _local.stores.pop(0)
        part = target.part(at)
        part.copy_(source.data.view(target.rows, -1)[: part.shape[0]])


def _fence() -> None:
    while _local.loads:
        _local.loads.pop().make()


def _initialise(bar: Buffers, count: int) -> None:
    bar.data[0].count = bar.data[0].pending = count


def _language() -> SimpleNamespace:
    nothing = lambda *_, **__: None  # noqa: E731
    return SimpleNamespace(
        constexpr=lambda value: value, static_range=range, int16=torch.int16,
        int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16,
        program_id=lambda axis: torch.tensor(_local.machine.program),
        num_programs=lambda axis: torch.tensor(_local.machine.programs),
        where=lambda a, b, c: torch.where(*_tensors(a, b, c)),
        minimum=lambda a, b: torch.minimum(*_tensors(a, b)),
        maximum=lambda a, b: torch.maximum(*_tensors(a, b)),
        exp2=torch.exp2, log2=torch.log2, sum=lambda x, axis: x.sum(axis),
        arange=lambda low, high, layout: torch.arange(low, high),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        reshape=lambda x, shape: x.reshape(shape), permute=lambda x, order: x.permute(order),
        split=lambda x: x.unbind(-1), join=lambda *x: torch.stack(x, -1),
        broadcast=lambda *x: torch.broadcast_tensors(*x), convert_layout=lambda x, *_, **__: x,
        inline_asm_elementwise=_assembly, load=_load, store=_store,
        allocate_shared_memory=_allocate, thread_barrier=nothing,
        warp_specialize=lambda parts, warps, registers: _local.machine.run(parts),
        NVMMADistributedLayout=nothing, DotOperandLayout=nothing, SliceLayout=nothing,
        BlockedLayout=nothing,
    )  # fmt: skip


_OWN = re.compile(
    r"^from reluformer\.ops\.backends\.triton\.([\w.]+) import ([^\n(]*|\([^)]*\))\n", re.M
)
_TRITON = re.compile(r"^from triton[^\n(]*(\([^)]*\))?\n", re.M)


def kernels(path: Path, change: tuple[str, str] = ("", "")) -> dict[str, Any]:
    """What a file of Gluon kernels defines, to be run in slow motion; with some text changed, there
    or in the files that it imports."""
    names, changed = _kernels(path, change)
    assert changed or not change[0], "nothing to change"
    return names


def _kernels(path: Path, change: tuple[str, str]) -> tuple[dict[str, Any], bool]:
    source = path.read_text()
    changed = change[0] in source
    source = source.replace(*change) if change[0] else source
    names = _runtime()
    for module, imported in _OWN.findall(source):
        wanted = re.findall(r"\w+", imported)
        if not module.startswith("hopper."):
            # Constants of other kernels.
            others = vars(importlib.import_module(f"reluformer.ops.backends.triton.{module}"))
            names |= {name: others[name].value for name in wanted}
            continue
        others, there = _kernels(path.with_name(f"{module.removeprefix('hopper.')}.py"), change)
        changed |= there
        names |= {name: others[name] for name in wanted}
    for imports in (_OWN, _TRITON):
        source = imports.sub(lambda found: "\n" * found[0].count("\n"), source)
    # Layouts mean nothing, and a cast that keeps the bits has another name.
    source = re.sub(r"\w+\.type\.layout", "None", source)
    source = source.replace(".to(gl.bfloat16, bitcast=True)", ".view(gl.bfloat16)")
    exec(compile(source, str(path), "exec"), names)
    return names, changed


def _range(*bounds: Any) -> Iterator[Tensor]:
    """Loops count in tensors there."""
    return map(torch.tensor, range(*map(int, bounds)))


def _runtime() -> dict[str, Any]:
    """What stands for Triton's own names."""
    jit = lambda function=None, **_: function or (lambda each: each)  # noqa: E731
    return {
        "gluon": SimpleNamespace(jit=jit),
        "gl": _language(),
        "range": _range,
        "fence_async_shared": _fence,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=_initialise,
            wait=lambda bar, phase: _local.machine.wait(bar, phase),
            arrive=lambda bar, count: _local.machine.arrive(bar),
            expect=lambda bar, bytes: _local.machine.arrive(bar, bytes),
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=lambda *args: _local.machine.fetch(*args),
            async_copy_shared_to_global=lambda *args: _local.stores.append(args),
            store_wait=_await_stores,
        ),
        "warpgroup_mma": _product,
        "warpgroup_mma_wait": _await_products,
    }


def launch(
    kernel: Callable[..., None], programs: int, *args: Any, seed: int = 0, **options: Any
) -> None:
    """Run all programs, one after the other."""
    for program in range(programs):
        _local.machine, _local.loads = Machine(program, programs, seed + program), []
        kernel(*args, **options)
