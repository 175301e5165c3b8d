"""The C launcher of a compiled kernel, called without Triton's Python layers.

A launch through Triton 3.6 runs two empty hook chains, builds metadata for them, encodes a tensor
map for every descriptor (cuTensorMapEncodeTiled) and asks CUDA about every pointer. A direct
launch calls the same C function with addresses as integers and with remembered tensor maps. It is
used for tensors that are known to be on the current GPU, and only while no hook is set.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.runtime import driver

from reluformer.ops.backends.triton import versions
from reluformer.ops.backends.triton.descriptors import View
from reluformer.ops.backends.triton.problem import NO_INPUTS

# Tensor maps to remember; each takes about half a kilobyte.
_MAP_LIMIT = 8192

_maps: dict[tuple[int, int], list[Any]] = {}
_slots = count()
_runtime = triton.knobs.runtime


def has_hooks() -> bool:
    """Whether a profiler wants to be called before or after launches."""
    for hook in (_runtime.launch_enter_hook, _runtime.launch_exit_hook):
        # A hook is a chain of callables, or None.
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


class _Described(NamedTuple):
    """The attributes of a `TensorDescriptor` that encoding reads, without its checks."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str


class _Slot(NamedTuple):
    """One descriptor argument: a number for its tensor maps, its view and Triton's metadata."""

    number: int
    view: View
    metadata: Any


class DirectLaunch:
    """A compiled kernel on the current device, as a C function and its fixed arguments."""

    def __init__(self, compiled: Any, launcher: Any, views: Sequence[View], metadata: Any) -> None:
        """Use `direct_launch`, which checks that the kernel can be launched this way."""
        self.launch: Callable[..., None] = launcher.launch
        if views:
            self.launch = inspect.getclosurevars(launcher.launch).nonlocals["launcher"]
        self.device: int = driver.active.get_current_device()
        self.stream: Callable[[int], int] = driver.active.get_current_stream
        self.fixed = (
            compiled.function,
            launcher.launch_cooperative_grid,
            launcher.launch_pdl,
            # No scratch memory.
            None,
            None,
            compiled.packed_metadata,
            # No hooks, and no metadata for them.
            None,
            None,
            None,
        )
        self._slots = [
            _Slot(next(_slots), view, each) for view, each in zip(views, metadata, strict=True)
        ]

    def arguments(self, values: Sequence[Any]) -> list[Any]:
        """The arguments of the C function for the first arguments of the kernel.

        Tensors, also those in tuples, become addresses; the first ones become tensor maps where
        the kernel takes descriptors. Other values are passed on.
        """
        args: list[Any] = []
        slots = self._slots
        for slot, tensor in zip(slots, values, strict=False):
            # Shape, strides and block belong to the slot, so the address identifies the map.
            key = (slot.number, tensor.data_ptr())
            args += _maps.get(key) or _encode(key, slot, tensor)
        for value in values[len(slots) :] if slots else values:
            if value is None or value is NO_INPUTS:
                args.append(value)
            elif isinstance(value, Tensor):
                args.append(value.data_ptr())
            elif isinstance(value, tuple):
                args.append(tuple([t.data_ptr() if isinstance(t, Tensor) else t for t in value]))
            else:
                args.append(value)
        return args


def _encode(key: tuple[int, int], slot: _Slot, tensor: Tensor) -> list[Any]:
    """The arguments that stand for a descriptor: its tensor map, shape and strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    view = slot.view
    encoded: list[Any] = make_tensordesc_arg(
        _Described(tensor, view.shape, view.strides, "zero"), slot.metadata
    )
    if len(_maps) >= _MAP_LIMIT:
        _maps.clear()
    _maps[key] = encoded
    return encoded


def direct_launch(compiled: Any, views: Sequence[View]) -> DirectLaunch | None:
    """The direct launch of a kernel that Triton has compiled and launched, or None.

    None if the launcher of this Triton version is not known, if the kernel needs scratch memory,
    or if its descriptors are not tensor maps.
    """
    if not versions.has_known_launcher():
        return None
    launcher = compiled.run
    metadata = getattr(compiled.metadata, "tensordesc_meta", None) or []
    if compiled.metadata.target.backend != "cuda":
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    if len(metadata) != len(views) or None in metadata:
        return None
    return DirectLaunch(compiled, launcher, views, metadata)
