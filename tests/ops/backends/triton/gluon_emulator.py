"""Emulator for Gluon kernels on the CPU: runs their source with one thread per warp partition.

Everything asynchronous happens as late as the hardware may do it:
    - A TMA copy fills its buffer with NaN at once and with data some time later.
    - A product reads its operands when it is waited for.
    - A TMA store reads its buffer when it is waited for.
    - A load from shared memory reads when a fence or the first use demands it.
A buffer that is released too early or read too soon therefore shows as NaN or as wrong numbers. A
barrier at which too few partitions arrive is a deadlock, which is detected when all partitions wait
and no copy is in flight. Layouts have no meaning here.
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

# Seconds that a partition sleeps after an arrival, one of these at random: other partitions go on.
PAUSES = (0.0, 0.0, 1e-3)
_local = threading.local()


class Pointer:
    """Pointer to an element of a tensor, or a tensor of pointers; offsets count elements."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset + offset)


class Descriptor:
    """TMA descriptor of a tensor [B, H, T, D] with tiles of `rows` rows.

    Rows past the end are read as zeros and are not written.
    """

    def __init__(self, tensor: Tensor, rows: int) -> None:
        self.tensor, self.rows, self.dtype, self.layout = tensor, rows, tensor.dtype, None

    def tile(self, at: list[Any]) -> Tensor:
        """The rows of a tile that exist, a view."""
        b, h, row, _ = (int(index) for index in at)
        assert b < self.tensor.shape[0] and h < self.tensor.shape[1]
        return self.tensor[b, h, row : row + self.rows]


class SharedMemory:
    """A buffer in shared memory, a part or a view of it; barriers are lists of `Barrier`."""

    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def shape(self) -> torch.Size:
        return self.data.shape  # type: ignore[no-any-return]

    def index(self, at: Any) -> "SharedMemory":
        return SharedMemory(self.data[int(at)])

    def reshape(self, shape: list[int]) -> "SharedMemory":
        return SharedMemory(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> "SharedMemory":
        return SharedMemory(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int) -> "SharedMemory":
        return SharedMemory(self.data.narrow(dim, start, length))

    def load(self, layout: object) -> "DeferredLoad":
        return DeferredLoad(self)

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)


class DeferredLoad:
    """Result of a load from shared memory, which happens at a fence or at the first use."""

    def __init__(self, source: SharedMemory) -> None:
        self.source, self.dtype = source, source.data.dtype
        self.result: Tensor | None = None
        _local.loads.append(self)

    def complete(self) -> Tensor:
        if self.result is None:
            self.result = self.source.data.clone()
        return self.result


class Barrier:
    """An mbarrier: arrivals and bytes that the current phase still needs, and completed phases."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def update(self) -> None:
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1


class DeferredProduct:
    """Result of left @ right plus an accumulator, computed when it is waited for."""

    def __init__(self, left: Any, right: SharedMemory, before: Any, use_acc: Any) -> None:
        self.left, self.right, self.before, self.use_acc = left, right, before, use_acc
        self.result: Tensor | None = None

    def complete(self) -> None:
        left = self.left.data if isinstance(self.left, SharedMemory) else _value(self.left)
        self.result = left.float() @ self.right.data.float()
        if bool(self.use_acc):
            self.result = self.result + _value(self.before)


def _value(x: Any) -> Tensor:
    """The tensor of a register value; a product must have been waited for."""
    if isinstance(x, DeferredLoad):
        return x.complete()
    if isinstance(x, DeferredProduct):
        assert x.result is not None, (
            "the result of a product is read before the product is waited for"
        )
        return x.result
    return x  # type: ignore[no-any-return]


class Program:
    """One program (CTA): its partitions, the copies in flight, and deadlock detection."""

    def __init__(self, program: int, programs: int, seed: int) -> None:
        self.program, self.programs = program, programs
        self.changed = threading.Condition()
        self.random = random.Random(seed)
        self.failures: list[BaseException] = []
        self.running = self.copies = 0
        self.waits: list[tuple[Barrier, int]] = []

    def run(self, partitions: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        threads = [
            threading.Thread(target=self._run_partition, args=partition, daemon=True)
            for partition in partitions
        ]
        self.running = len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]

    def _run_partition(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        _local.cta, _local.products, _local.stores, _local.loads = self, [], [], []
        try:
            function(*args)
            assert not _local.stores, "a partition ends before its stores are complete"
        except BaseException as failure:
            self.failures.append(failure)
        with self.changed:
            self.running -= 1
            self._check_deadlock()
            self.changed.notify_all()

    def _check_deadlock(self) -> None:
        """Fail if all partitions wait for phases that nothing in flight can complete."""
        stuck = all(barrier.phase % 2 == phase for barrier, phase in self.waits)
        if self.waits and len(self.waits) == self.running and not self.copies and stuck:
            self.failures.append(AssertionError("deadlock"))
            self.changed.notify_all()

    def wait(self, bar: SharedMemory, phase: Any) -> None:
        """Wait until the phase of this parity is complete."""
        barrier: Barrier = bar.data[0]
        entry = (barrier, int(phase))
        with self.changed:
            self.waits.append(entry)
            self._check_deadlock()
            self.changed.wait_for(lambda: self.failures or barrier.phase % 2 != entry[1])
            self.waits.remove(entry)
            assert not self.failures, "another partition has failed"

    def arrive(self, bar: SharedMemory, bytes: int = 0) -> None:
        """Arrive once; the phase also needs this number of bytes from copies."""
        with self.changed:
            barrier: Barrier = bar.data[0]
            barrier.pending -= 1
            barrier.bytes += bytes
            barrier.update()
            self.changed.notify_all()
        # Let other partitions go first: a buffer that is released too early is overwritten.
        time.sleep(self.random.choice(PAUSES))

    def copy(self, source: Descriptor, at: list[Any], bar: SharedMemory, to: SharedMemory) -> None:
        """Start a TMA copy of a tile to shared memory."""
        to.data.fill_(float("nan"))
        tile, delay = source.tile(at), self.random.choice((0.0, 0.0, 1e-3))
        with self.changed:
            self.copies += 1

        def complete() -> None:
            time.sleep(delay)
            flat = to.data.view(source.rows, -1)
            flat.zero_()
            flat[: tile.shape[0]].copy_(tile)
            with self.changed:
                barrier: Barrier = bar.data[0]
                barrier.bytes -= flat.numel() * flat.element_size()
                barrier.update()
                self.copies -= 1
                self._check_deadlock()
                self.changed.notify_all()

        threading.Thread(target=complete, daemon=True).start()


def _tensors(*values: Any) -> list[Any]:
    return [x if isinstance(x, Tensor) else torch.tensor(x) for x in map(_value, values)]


def _load(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
    offset, mask = torch.broadcast_tensors(*_tensors(pointer.offset, mask))
    values = pointer.tensor.view(-1)[torch.where(mask, offset, 0)]
    return values.masked_fill(~mask, other)


def _store(pointer: Pointer, value: Tensor, mask: Any) -> None:
    mask = torch.as_tensor(mask).expand(pointer.offset.shape)
    pointer.tensor.view(-1)[pointer.offset[mask]] = value[mask]


def _allocate(dtype: torch.dtype, shape: list[int], layout: object) -> SharedMemory:
    if dtype == torch.int64:
        return SharedMemory([[Barrier()] for _ in range(shape[0])])
    return SharedMemory(torch.full(shape, float("nan"), dtype=dtype))


def _assembly(code: str, constraints: str, args: list[Any], dtype: Any, **_: Any) -> Any:
    return instructions.run(code, [_value(x) for x in args])


def _product(
    left: Any, right: SharedMemory, acc: Any, use_acc: Any = True, is_async: bool = False
) -> Any:
    product = DeferredProduct(left, right, acc, use_acc)
    _local.products.append(product)
    return product


def _wait_products(in_flight: int, results: list[Any]) -> Any:
    """Complete products, oldest first, until `in_flight` are left."""
    while len(_local.products) > in_flight:
        _local.products.pop(0).complete()
    values = [
        x if isinstance(x, DeferredProduct) and x.result is None else _value(x) for x in results
    ]
    return values[0] if len(values) == 1 else values


def _wait_stores(in_flight: int) -> None:
    """Complete TMA stores, oldest first, until `in_flight` are left."""
    while len(_local.stores) > in_flight:
        target, at, source = _local.stores.pop(0)
        tile = target.tile(at)
        tile.copy_(source.data.view(target.rows, -1)[: tile.shape[0]])


def _fence() -> None:
    """Complete the loads from shared memory."""
    while _local.loads:
        _local.loads.pop().complete()


def _initialise(bar: SharedMemory, count: int) -> None:
    bar.data[0].count = bar.data[0].pending = count


def _language() -> SimpleNamespace:
    """Replacement of `triton.experimental.gluon.language`."""
    nothing = lambda *_, **__: None  # noqa: E731
    return SimpleNamespace(
        constexpr=lambda value: value, static_range=range, int16=torch.int16,
        int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16,
        program_id=lambda axis: torch.tensor(_local.cta.program),
        num_programs=lambda axis: torch.tensor(_local.cta.programs),
        where=lambda a, b, c: torch.where(*_tensors(a, b, c)),
        minimum=lambda a, b: torch.minimum(*_tensors(a, b)),
        maximum=lambda a, b: torch.maximum(*_tensors(a, b)),
        exp2=torch.exp2, log2=torch.log2, abs=torch.abs, sum=lambda x, axis: x.sum(axis),
        arange=lambda low, high, layout: torch.arange(low, high),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        reshape=lambda x, shape: _value(x).reshape(shape),
        permute=lambda x, order: x.permute(order),
        split=lambda x: x.unbind(-1), join=lambda *x: torch.stack(x, -1),
        broadcast=lambda *x: torch.broadcast_tensors(*x), convert_layout=lambda x, *_, **__: x,
        inline_asm_elementwise=_assembly, load=_load, store=_store,
        allocate_shared_memory=_allocate,
        warp_specialize=lambda partitions, warps, registers: _local.cta.run(partitions),
        NVMMADistributedLayout=nothing, DotOperandLayout=nothing, SliceLayout=nothing,
        BlockedLayout=nothing,
    )  # fmt: skip


_OWN = re.compile(
    r"^from reluformer\.ops\.backends\.triton\.([\w.]+) import ([^\n(]*|\([^)]*\))\n", re.M
)
_TRITON = re.compile(r"^from triton[^\n(]*(\([^)]*\))?\n", re.M)


def kernels(path: Path, change: tuple[str, str] = ("", "")) -> dict[str, Any]:
    """The functions that a file of Gluon kernels defines, to be run by `launch`.

    Args:
        path: the file.
        change: a text and its replacement, made in the file and in the kernel files it imports.
    """
    names, changed = _kernels(path, change)
    assert changed or not change[0], f"{path.name} does not contain {change[0]!r}"
    return names


def _kernels(path: Path, change: tuple[str, str]) -> tuple[dict[str, Any], bool]:
    source = path.read_text()
    changed = change[0] in source
    source = source.replace(*change) if change[0] else source
    names = _runtime()
    for module, imported in _OWN.findall(source):
        wanted = re.findall(r"\w+", imported)
        if module == "versions":
            # Functions whose names depend on the version; `_runtime` replaces them.
            continue
        if not module.startswith("hopper."):
            # Constants of the portable kernels.
            others = vars(importlib.import_module(f"reluformer.ops.backends.triton.{module}"))
            names |= {name: others[name].value for name in wanted}
            continue
        imported_file = path.with_name(f"{module.removeprefix('hopper.')}.py")
        others, also_changed = _kernels(imported_file, change)
        changed |= also_changed
        names |= {name: others[name] for name in wanted}
    for imports in (_OWN, _TRITON):
        # Keep the line numbers.
        source = imports.sub(lambda match: "\n" * match[0].count("\n"), source)
    # Layouts have no meaning, and a cast that keeps the bits has another name in torch.
    source = re.sub(r"\w+\.type\.layout", "None", source)
    source = source.replace(".to(gl.bfloat16, bitcast=True)", ".view(gl.bfloat16)")
    exec(compile(source, str(path), "exec"), names)
    return names, changed


def _range(*bounds: Any) -> Iterator[Tensor]:
    """`range` whose loop variable is a tensor, as in a kernel."""
    return map(torch.tensor, range(*map(int, bounds)))


def _runtime() -> dict[str, Any]:
    """Replacements of the names that kernel files import from Triton."""
    jit = lambda function=None, **_: function or (lambda kernel: kernel)  # noqa: E731
    return {
        "gluon": SimpleNamespace(jit=jit),
        "gl": _language(),
        "range": _range,
        "fence_async_shared": _fence,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=_initialise,
            wait=lambda bar, phase: _local.cta.wait(bar, phase),
            arrive=lambda bar, count: _local.cta.arrive(bar),
            expect=lambda bar, bytes: _local.cta.arrive(bar, bytes),
        ),
        "tma": SimpleNamespace(store_wait=_wait_stores),
        "thread_barrier": lambda: None,
        "tma_load": lambda *args: _local.cta.copy(*args),
        "tma_store": lambda *args: _local.stores.append(args),
        "warpgroup_mma": _product,
        "warpgroup_mma_wait": _wait_products,
    }


def launch(
    kernel: Callable[..., None], programs: int, *args: Any, seed: int = 0, **options: Any
) -> None:
    """Run all programs of a grid, one after the other; `seed` chooses delays and pauses."""
    for program in range(programs):
        _local.cta, _local.loads = Program(program, programs, seed + program), []
        kernel(*args, **options)
