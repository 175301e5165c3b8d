"""A Hopper GPU as far as Triton's compiler and launcher need one, on any machine."""

from typing import Any

from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import wrap_handle_tensordesc

from reluformer.ops.backends.triton import versions

# Triton 3.6 passes metadata and hooks after the scratch memory, later versions before it.
IS_OLD = versions.installed() == (3, 6)
HOOKS = slice(10, 13) if IS_OLD else slice(8, 11)
"""Launch metadata and the two hooks among the arguments of the C function."""


class FakeLauncher:
    """`CudaLauncher` with a Python function in place of the compiled C function.

    `launched` holds the arguments of every call of that function.
    """

    launched: list[tuple[str, list[Any]]] = []

    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = src.name
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid = self.launch_pdl = False
        self.arg_annotations, self.kernel_signature = "annotations", "signature"
        self.launch = wrap_handle_tensordesc(
            self._record, src.signature, getattr(metadata, "tensordesc_meta", None)
        )

    def _record(self, *args: Any) -> None:
        FakeLauncher.launched.append((self.name, list(args)))
        metadata, enter_hook, exit_hook = args[HOOKS]
        for hook in (enter_hook, exit_hook):
            if hook is not None:
                hook(metadata)

    def __call__(
        self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: int, *args: Any
    ) -> None:
        start = (grid_x, grid_y, grid_z, stream, function)
        start += (self.launch_cooperative_grid, self.launch_pdl)
        if IS_OLD:
            self.launch(*start, None, None, *args)
        else:
            types = (self.arg_annotations, self.kernel_signature)
            self.launch(*start, *args[:4], None, None, *types, args[4:])


class FakeUtils:
    """A device that loads every binary; a tensor map is its arguments but the address."""

    encoded = 0
    """Number of tensor maps that were encoded."""

    def load_binary(self, *args: Any) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def fill_tma_descriptor(self, address: int, *args: Any) -> str:
        FakeUtils.encoded += 1
        return f"map of {args}"

    fill_tma_descriptor_tiled = fill_tma_descriptor


class FakeDriver:
    """The driver of a GPU, by default a Hopper GPU."""

    utils = FakeUtils()
    launcher_cls = FakeLauncher

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7


def without_addresses(value: Any) -> Any:
    """An argument of the C function as text that does not depend on where tensors are.

    Addresses are told from other integers by their size; the heap may begin at a few megabytes.
    """
    if isinstance(value, tuple | list):
        return tuple(without_addresses(each) for each in value)
    if isinstance(value, Tensor) or (isinstance(value, int) and value >= 1 << 22):
        return "address"
    return str(value)
