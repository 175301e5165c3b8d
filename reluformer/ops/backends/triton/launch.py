"""Launches that are prepared once and remembered by the signature of a call.

Short attention calls take less time on the GPU than their preparation in Python. Everything about
a launch but its addresses follows from the shapes, strides, dtypes and settings of a call;
`signature` is all of that as a key. A remembered launch goes straight to the C launcher.
"""

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from reluformer.ops.backends.torch_state import allows_tf32
from reluformer.ops.backends.triton import tuning
from reluformer.ops.backends.triton.descriptors import View, tile_view
from reluformer.ops.backends.triton.direct import DirectLaunch, direct_launch, has_hooks

# Lengths vary in training; a forgotten launch costs a fraction of a millisecond once.
_LIMIT = 4096

# Fused multiply-add is Triton's default up to 3.9, which warns that 3.10 turns it off.
_COMPILATION = {"enable_fp_fusion": True}

Key = tuple[Hashable, ...]
KeyParts = tuple[Key, Sequence[Tensor | None]]
"""The arguments of `signature`."""
T = TypeVar("T")


class Memory(dict[Key, T]):
    """Values by signature. `put` bounds their number."""

    def put(self, key: Key, value: T) -> T:
        """Store and return the value; a full memory is cleared."""
        if len(self) >= _LIMIT:
            self.clear()
        self[key] = value
        return value


def signature(numbers: Key, tensors: Sequence[Tensor | None]) -> Key:
    """Key of everything that a launch depends on: `numbers`, and all of the tensors but addresses.

    Of an address it matters whether it is a multiple of 16 bytes: other calls need other code.
    """
    first = tensors[0]
    assert first is not None
    has_tf32 = first.dtype == torch.float32 and allows_tf32()
    key: list[Hashable] = [numbers, tuning.current(), has_tf32]
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        else:
            is_aligned = not tensor.data_ptr() & 15
            key += (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), is_aligned)
    return tuple(key)


class Launch:
    """A kernel with its grid and all arguments but the tensors."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        scalars: Sequence[Any],
        options: dict[str, Any],
        described: Sequence[tuple[Tensor, int]] = (),
    ) -> None:
        """Prepare a launch.

        Args:
            kernel: A function compiled by Triton, whose tensors are its first arguments.
            programs: Size of the grid, which has one dimension.
            scalars: The arguments after the tensors: numbers and tuples of numbers.
            options: Compile-time arguments and options such as num_warps, by name.
            described: The first tensors of a call that go through descriptors (a call passes
                tensors of the same shape and strides), each with the rows of its tiles.
        """
        self.kernel, self.programs = kernel, programs
        self.scalars, self.options = tuple(scalars), {**_COMPILATION, **options}
        self.views = [tile_view(tensor, rows) for tensor, rows in described]
        self.direct: DirectLaunch | None = None
        """Set by the first launch, where the C launcher can be called directly."""

    def __call__(self, *tensors: Any) -> None:
        """Run on the kernel's tensors; None for absent ones, optional ones in their tuple."""
        direct = self.direct
        if direct is not None and not has_hooks():
            direct.function(
                self.programs, 1, 1, direct.stream(direct.device), *direct.fixed,
                *direct.arguments(*tensors),
            )  # fmt: skip
            return
        sources: list[Any] = list(map(self.describe, tensors, self.views))
        args = [*sources, *tensors[len(sources) :], *self.scalars]
        # Grids of one dimension: the others are limited to 65535 programs.
        compiled = self.kernel[(self.programs,)](*args, **self.options)
        if compiled is not None and self.direct is None:
            constants = (*self.scalars, *_constants(self.kernel, args, self.options))
            self.direct = direct_launch(compiled, self.views, tensors, constants)

    def describe(self, tensor: Tensor, view: View) -> Any:
        """The descriptor that the kernel takes when it is called through Triton."""
        return TensorDescriptor(tensor, *view)


class SizedLaunch:
    """A kernel with its options, for grids and numbers that change from call to call.

    Numbers that change must not choose another compilation: list them in `do_not_specialize`.
    """

    def __init__(self, kernel: Any, options: dict[str, Any]) -> None:
        self.kernel, self.options = kernel, {**_COMPILATION, **options}
        self.direct: DirectLaunch | None = None

    def __call__(self, programs: int, args: Sequence[Any]) -> None:
        """Run on a grid of `programs` with all arguments but the compile-time ones."""
        direct = self.direct
        if direct is not None and not has_hooks():
            direct.function(
                programs, 1, 1, direct.stream(direct.device), *direct.fixed,
                *direct.arguments(*args),
            )  # fmt: skip
            return
        compiled = self.kernel[(programs,)](*args, **self.options)
        if compiled is not None and self.direct is None:
            constants = _constants(self.kernel, args, self.options)
            self.direct = direct_launch(compiled, (), args, constants)


LAUNCHES: Memory[Launch] = Memory()
SIZED_LAUNCHES: Memory[SizedLaunch] = Memory()


def _constants(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Values of the kernel's remaining arguments, which are compile-time ones."""
    return tuple(options[name] for name in kernel.arg_names[len(args) :])


@cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; a small number on other devices."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_other_device(q: Tensor) -> bool:
    """Whether q is on another GPU than the current one."""
    device = q.get_device()
    # `torch.cuda.current_device` without its test whether CUDA is initialised.
    return device >= 0 and device != torch._C._cuda_getDevice()
