"""Differences between Triton versions, and the versions that the kernels are tested with.

Gluon, the language of the Hopper kernels, is experimental: functions are renamed from one version
to the next. The C launcher that `direct` calls is private to Triton and changes as well.
"""

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import triton

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import tma
except ImportError:
    # A version without Gluon runs the portable kernels.
    gl = tma = None

log = logging.getLogger("reluformer")

Version = tuple[int, int]
"""Major and minor version."""

PORTABLE: tuple[Version, Version] = ((3, 6), (3, 9))
"""First and last version that the portable kernels are tested with."""
HOPPER: tuple[Version, ...] = ((3, 6), (3, 9))
"""Versions with which today's Hopper kernels have run on a GPU; no emulator shows every race."""
_HOPPER_RECENT: tuple[Version, ...] = ((3, 6),)
"""The same for stored score gradients, three consumers, and consumers that convert late."""
_DIRECT: tuple[Version, ...] = ((3, 6), (3, 9))


def installed() -> Version:
    """The installed version of Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


@cache
def runs_hopper() -> bool:
    """Whether the Hopper kernels may be used with the installed version."""
    return installed() in HOPPER


@cache
def runs_recent_hopper() -> bool:
    """Whether stored score gradients, three consumers and late conversion may be the default."""
    return installed() in _HOPPER_RECENT


@cache
def has_known_launcher() -> bool:
    """Whether `direct` may call the C launcher; other versions launch through Triton."""
    return installed() in _DIRECT


@cache
def warn_if_untested(is_hopper: bool) -> None:
    """Log one warning if the kernels for this GPU are not tested with the installed version."""
    first, last = PORTABLE
    name = triton.__version__
    if not first <= installed() <= last:
        log.warning(
            "Triton %s is not tested (tested: %s to %s); the portable kernels are used",
            name, _text(first), _text(last),
        )  # fmt: skip
    elif is_hopper and not runs_hopper():
        tested = " and ".join(map(_text, HOPPER))
        log.warning(
            "The Hopper kernels are not tested with Triton %s (tested: %s); the slower portable "
            "kernels are used",
            name, tested,
        )  # fmt: skip


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def _function(module: Any, *names: str) -> Any:
    """The first function of these names that the module has, or None."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


class LauncherCall(NamedTuple):
    """The C function that launches a compiled kernel, and how it is called.

    Its arguments are the grid (three integers), the stream, `fixed`, and those of the kernel.
    """

    function: Callable[..., None]
    fixed: tuple[Any, ...]
    takes_tuple: bool
    """Whether the arguments of the kernel are passed as one tuple."""


def launcher_call(compiled: Any, has_descriptors: bool) -> LauncherCall:
    """The C launcher of a compiled kernel, without hooks and scratch memory.

    Args:
        compiled: A kernel that Triton has launched, of a version for which `has_known_launcher`.
        has_descriptors: Whether the kernel takes tensor descriptors.
    """
    launcher = compiled.run
    function = launcher.launch
    if has_descriptors:
        # Triton wraps the C function in one that encodes tensor maps.
        function = inspect.getclosurevars(function).nonlocals["launcher"]
    start = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    scratch, hooks = (None, None), (None, None, None)
    if installed() == (3, 6):
        # One C function is compiled for each signature.
        return LauncherCall(function, (*start, *scratch, compiled.packed_metadata, *hooks), False)
    # One C function reads the types of the arguments from a description.
    types = (launcher.arg_annotations, launcher.kernel_signature)
    return LauncherCall(
        function, (*start, compiled.packed_metadata, *hooks, *scratch, *types), True
    )


def encode_descriptor(described: Any, metadata: Any) -> list[Any]:
    """The kernel arguments that stand for a descriptor: its tensor map, shape and strides.

    Args:
        described: An object with the attributes of a `TensorDescriptor`.
        metadata: The entry of the compiled kernel's `tensordesc_meta`.
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg

    others = () if installed() == (3, 6) else ((),)
    encoded: list[Any] = make_tensordesc_arg(described, metadata, *others)
    return encoded


# The new names come first: 3.9 keeps some of the old ones as functions that raise.
thread_barrier = _function(gl, "barrier", "thread_barrier")
"""Synchronises the threads of the calling warps; a device function."""
tma_load = _function(tma, "async_load", "async_copy_global_to_shared")
"""Starts a TMA copy from global to shared memory; a device function."""
tma_store = _function(tma, "async_store", "async_copy_shared_to_global")
"""Starts a TMA copy from shared to global memory; a device function."""
