"""Launches that are prepared once: attention on short sequences takes less time than Python does.

Everything about a launch but its pointers follows from the shapes, strides, types and numbers of a
call. `signature` is all of that as a key; under it `LAUNCHES` keeps a `Launch` with tile, grid,
scalars and, from the second time on, the compiled kernel itself, called as Triton's own `run` calls
it after it has bound, specialised and looked up its arguments.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from reluformer.ops.backends.triton import tuning
from reluformer.ops.backends.triton.plan import interpreting, pad

# The versions of Triton whose compiled kernels are known to take all arguments, constants too.
_COMPILED_TAKE_ALL = triton.__version__.startswith("3.6.")
# Lengths vary in training; a forgotten launch costs a fraction of a millisecond once.
_LIMIT = 4096

View = tuple[list[int], list[int], list[int]]
"""Shape, strides and tile of a descriptor."""

LAUNCHES: dict[tuple[Any, ...], "Launch | Prepared"] = {}


def signature(numbers: tuple[Any, ...], tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """All that a launch depends on: `numbers`, and of the tensors everything but the address.

    Empty if an address is not a multiple of 16 bytes, which asks for other code.
    """
    first = tensors[0]
    assert first is not None
    precision = torch.get_float32_matmul_precision() if first.dtype == torch.float32 else None
    key: list[Any] = [numbers, tuning.current(), first.get_device(), precision]
    addresses = 0
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        else:
            addresses |= tensor.data_ptr()
            key += (tensor.dtype, tensor.shape, tensor.stride())
    return () if addresses % 16 else tuple(key)


def remember(key: tuple[Any, ...], launch: "Launch | Prepared") -> None:
    """Keep the launch under the key, unless that is empty."""
    if key:
        if len(LAUNCHES) >= _LIMIT:
            LAUNCHES.clear()
        LAUNCHES[key] = launch


class _Described(NamedTuple):
    """What a compiled kernel reads of a descriptor: `TensorDescriptor` without its checks."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str


class Launch:
    """A kernel, its grid and all of its arguments but the tensors."""

    descriptors_only = False
    """Whether the kernel knows tiled tensors by descriptors alone, and takes no strides."""

    def __init__(
        self,
        kernel: Any,
        tile: tuning.Tile,
        programs: int,
        tiled: Sequence[tuple[Tensor, int]],
        numbers: Sequence[float | None],
        switches: dict[str, Any],
        *,
        store_by_pointer: int = 0,
    ) -> None:
        """`tiled` are the tensors read or written in tiles of so many rows, in the kernel's order.

        With the switch `TMA` they go through descriptors, but for the last `store_by_pointer`.
        """
        self.kernel, self.tile, self.programs, self.switches = kernel, tile, programs, switches
        strided = () if self.descriptors_only else tiled
        self.numbers = (*(step for each, _ in strided for step in steps(each)), *numbers)
        by_descriptor = self.descriptors_only or switches.get("TMA")
        described = len(tiled) - store_by_pointer if by_descriptor else 0
        self.views = [view(tensor, rows) for tensor, rows in tiled[:described]]
        self.compiled: Any = None
        self.constants: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor | None) -> None:
        """Run on the tiled tensors followed by the others, None for those that are not there."""
        views = self.views
        if self.compiled is not None:
            sources: list[Any] = [
                _Described(tensor, shape, strides, "zero")  # type: ignore[arg-type]
                for tensor, (shape, strides, _) in zip(tensors, views, strict=False)
            ]
            self.compiled(*sources, *tensors[len(views) :], *self.constants)
            return
        sources = [self.describe(*pair) for pair in zip(tensors, views, strict=False)]
        args = [*sources, *tensors[len(views) :], *self.numbers]
        compiled = run(self.kernel, self.programs, args, **self.switches)
        if compiled is not None and _COMPILED_TAKE_ALL:
            names = self.kernel.arg_names[len(args) :]
            self.constants = (*self.numbers, *(self.switches[name] for name in names))
            self.compiled = compiled[(self.programs, 1, 1)]

    def describe(self, tensor: Tensor | None, shape: View) -> Any:
        """The descriptor that the kernel takes when it is first called."""
        return TensorDescriptor(tensor, *shape)


class Prepared:
    """A kernel and its switches, for arguments and grids that change from call to call.

    What changes must not choose another compilation: it is listed in `do_not_specialize`.
    """

    def __init__(self, kernel: Any, switches: dict[str, Any]) -> None:
        self.kernel, self.switches = kernel, switches
        self.compiled: Any = None
        self.constants: tuple[Any, ...] = ()

    def __call__(self, programs: int, args: list[Any]) -> None:
        """Run on all arguments but the switches."""
        if self.compiled is not None:
            self.compiled[(programs, 1, 1)](*args, *self.constants)
            return
        compiled = run(self.kernel, programs, args, **self.switches)
        if compiled is not None and _COMPILED_TAKE_ALL:
            self.constants = tuple(
                self.switches[name] for name in self.kernel.arg_names[len(args) :]
            )
            self.compiled = compiled


def run(kernel: Any, programs: int, args: list[Any], **options: Any) -> Any:
    """Launch on a grid of one dimension (others are limited to 65535 programs)."""
    return kernel[(programs,)](*args, **options)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few where there is none."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_other_device(q: Tensor) -> bool:
    """Whether q is on another GPU than the current one."""
    device = q.get_device()
    return device >= 0 and device != torch.cuda.current_device()


def use_descriptors(tensors: Sequence[Tensor]) -> bool:
    """Whether tiles of these tensors go through tensor-memory descriptors."""
    forced = tuning.current().tma
    # Three-product float32 keeps its operands in registers; descriptors only make it spill.
    if forced is None and tensors[0].element_size() != 2:
        return False
    if forced is False or not all(_describable(tensor) for tensor in tensors):
        return False
    if forced or not tensors[0].is_cuda or interpreting():
        return bool(forced)
    return torch.version.hip is None and torch.cuda.get_device_capability(tensors[0].device)[0] >= 9


def _describable(tensor: Tensor) -> bool:
    """Whether a tensor-memory descriptor can address it: 16-byte steps, every dimension real."""
    itemsize = tensor.element_size()
    if tensor.data_ptr() % 16 or tensor.stride(-1) != 1 or tensor.numel() == 0:
        return False
    return all(
        size == 1 or (0 < step * itemsize < 1 << 40 and step * itemsize % 16 == 0)
        for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )


def steps(tensor: Tensor | None) -> tuple[int, ...]:
    """Strides of batch, head and row; zeros for a tensor that is not there."""
    return (0, 0, 0) if tensor is None else tensor.stride()[:-1]


def view(tensor: Tensor, rows: int) -> View:
    """Of a descriptor with tiles of `rows` x padded width."""
    width = tensor.shape[-1]
    # The step of a dimension of size one is free: give it a legal one.
    strides = [
        width * 16 if size == 1 and at < 3 else step
        for at, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
    return list(tensor.shape), strides, [1, 1, rows, pad(width)]
