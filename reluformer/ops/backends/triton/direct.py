"""The C launcher of a compiled kernel, called without Triton's Python layers.

A launch through Triton runs two empty hook chains, builds metadata for them, encodes a tensor map
for every descriptor (cuTensorMapEncodeTiled) and asks CUDA about every pointer. A direct launch
calls the same C function with addresses as integers and with remembered tensor maps. It is used for
tensors that are known to be on the current GPU, and only while no hook is set.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.runtime import driver

from reluformer.ops.backends.triton import versions
from reluformer.ops.backends.triton.descriptors import View

# Tensor maps to remember; each takes about half a kilobyte.
_MAP_LIMIT = 8192

_maps: dict[tuple[int, int], list[Any]] = {}
_slots = count()
_runtime = triton.knobs.runtime


def has_hooks() -> bool:
    """Whether a profiler wants to be called before or after launches."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    # A hook is a chain of callables, or None.
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )


class _Described(NamedTuple):
    """The attributes of a `TensorDescriptor` that encoding reads, without its checks."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str
    round_f32_to_tf32: bool = False


class _Slot(NamedTuple):
    """One descriptor argument: a number for its tensor maps, its view and Triton's metadata."""

    number: int
    view: View
    metadata: Any


class DirectLaunch:
    """A compiled kernel on the current device, as a C function and its fixed arguments.

    The C function takes the grid, the stream, the `fixed` arguments, and the result of `arguments`.
    """

    def __init__(
        self, compiled: Any, views: Sequence[View], values: Sequence[Any], constants: Sequence[Any]
    ) -> None:
        """Use `direct_launch`, which checks that the kernel can be launched this way."""
        # A compiled kernel unloads its code when it is deleted.
        self.compiled = compiled
        call = versions.launcher_call(compiled, has_descriptors=bool(views))
        self.function, self.fixed = call.function, call.fixed
        self.device: int = driver.active.get_current_device()
        self.stream: Callable[[int], int] = driver.active.get_current_stream
        metadata = getattr(compiled.metadata, "tensordesc_meta", None) or []
        slots = [_Slot(next(_slots), *slot) for slot in zip(views, metadata, strict=True)]
        self.arguments = _argument_function(slots, values, tuple(constants), call.takes_tuple)
        """From the first arguments of the kernel to all those of the C function."""


def _argument_function(
    slots: Sequence[_Slot], values: Sequence[Any], constants: tuple[Any, ...], takes_tuple: bool
) -> Callable[..., tuple[Any, ...]]:
    """A function from the first arguments of a kernel to those of its C function.

    Tensors, also those in tuples, become addresses; the first ones become tensor maps where the
    kernel takes descriptors. Other values are passed on, and `constants` follow. Which arguments
    are tensors is the same in every launch of a compiled kernel, so the function is written once,
    from example `values`, and tests no types.
    """
    names = [f"a{i}" for i in range(len(values))]
    parts = []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        if i < len(slots):
            # Shape, strides and block belong to the slot, so the address identifies the map.
            key = f"({slots[i].number}, {name}.data_ptr())"
            parts.append(f"*(find({key}) or encode(slots[{i}], {name}))")
        elif isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
            items = [_address(f"{name}[{j}]", item) for j, item in enumerate(value)]
            parts.append(f"({', '.join(items)},)")
        else:
            parts.append(_address(name, value))
    result = f"({', '.join(parts)}, *constants)"
    source = f"lambda {', '.join(names)}: {f'({result},)' if takes_tuple else result}"
    scope = {"find": _maps.get, "encode": _encode, "slots": slots, "constants": constants}
    function: Callable[..., tuple[Any, ...]] = eval(source, scope)  # noqa: S307
    return function


def _address(name: str, value: Any) -> str:
    """Expression for an argument: the address of a tensor, other values themselves."""
    return f"{name}.data_ptr()" if isinstance(value, Tensor) else name


def _encode(slot: _Slot, tensor: Tensor) -> list[Any]:
    """The arguments that stand for a descriptor: its tensor map, shape and strides."""
    view = slot.view
    described = _Described(tensor, view.shape, view.strides, "zero")
    encoded = versions.encode_descriptor(described, slot.metadata)
    if len(_maps) >= _MAP_LIMIT:
        _maps.clear()
    _maps[slot.number, tensor.data_ptr()] = encoded
    return encoded


def direct_launch(
    compiled: Any, views: Sequence[View], values: Sequence[Any], constants: Sequence[Any]
) -> DirectLaunch | None:
    """The direct launch of a kernel that Triton has compiled and launched, or None.

    None if the launcher of this Triton version is not known, if the kernel needs scratch memory,
    or if its descriptors are not tensor maps.

    Args:
        compiled: The compiled kernel.
        views: Views of the descriptors, the kernel's first arguments.
        values: The first arguments of the first launch, with tensors in place of descriptors.
        constants: The remaining arguments, which are the same in every launch.
    """
    if not versions.has_known_launcher():
        return None
    launcher = compiled.run
    metadata = getattr(compiled.metadata, "tensordesc_meta", None) or []
    if compiled.metadata.target.backend != "cuda":
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    if getattr(launcher, "gsan_enabled", False):
        # The sanitizer of Triton 3.9 has arguments of its own.
        return None
    if len(metadata) != len(views) or None in metadata:
        return None
    return DirectLaunch(compiled, views, values, constants)
