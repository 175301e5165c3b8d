"""A call is short: few of our frames lie between the public function and the kernel's launch."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import reluformer
from reluformer import relu_attention
from reluformer.ops.backends.cpu.native import library

PACKAGE = str(Path(reluformer.__file__).parent)
LAUNCH, NESTED = 6, 7

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "gamma": True, "threshold": True},
    {"power": 4, "row_normalise": 0.1, "threshold": True, "return_sums": "row_sum"},
    {"window": 5, "key_lengths": True, "gamma": True, "return_sums": "entropy"},
    {"mask": True, "dropout_p": 0.1},
]


class Stack:
    """The deepest nesting of our frames, and that at each launch of a kernel."""

    def __init__(self) -> None:
        self.deepest: list[str] = []
        self.launches: list[list[str]] = []

    def ours(self, frame: FrameType | None) -> list[str]:
        """Names of our frames from the given one outwards; empty inside an interpreted kernel."""
        names = []
        while frame is not None:
            code = frame.f_code
            if "triton/runtime" in code.co_filename:
                return []
            if code.co_filename.startswith(PACKAGE):
                names.append(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}")
            frame = frame.f_back
        return names

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """Hook of `sys.setprofile`."""
        if event == "c_call":
            if getattr(argument, "__name__", "") in ("bmm", "baddbmm_"):
                self.launches.append(self.ours(frame))
        elif event == "call":
            if "triton/runtime" in frame.f_code.co_filename:
                names = self.ours(frame.f_back)
                if names:
                    self.launches.append(names)
            elif frame.f_code.co_filename.startswith(PACKAGE):
                self.deepest = max(self.deepest, self.ours(frame), key=len)


@contextmanager
def watch() -> Iterator[Stack]:
    stack = Stack()
    sys.setprofile(stack.profile)
    try:
        yield stack
    finally:
        sys.setprofile(None)


def call(impl: str, options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """A call of the public function whose result is one number."""
    q, k, v = (torch.randn(2, 4, 20, 16, requires_grad=True) for _ in "qkv")
    tensors = {
        "gamma": torch.rand(4, requires_grad=True),
        "threshold": (torch.rand(4) - 1).requires_grad_(),
        "key_lengths": torch.tensor([20, 7]),
        "mask": torch.rand(20, 20) > 0.3,
    }
    given = {name: tensors[name] if value is True and name in tensors else value
             for name, value in options.items()}  # fmt: skip

    def run() -> torch.Tensor:
        result = relu_attention(q, k, v, impl=impl, **given)
        return result if isinstance(result, torch.Tensor) else result.output

    return run


def check(stack: Stack, *, launches: bool = True) -> None:
    assert len(stack.deepest) <= NESTED, stack.deepest
    assert stack.launches or not launches
    for names in stack.launches:
        assert len(names) <= LAUNCH, names


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("way", "remembered"),
    [
        ("native", False),
        ("native", True),
        ("torch", False),
        ("torch", True),
        # The first call loads Triton.
        ("triton", True),
    ],
)
def test_frames(
    way: str,
    remembered: bool,
    options: dict[str, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is off")
    kernels: library.Kernels | None = None
    if way == "native":
        kernels = request.getfixturevalue("compiled")
    else:
        monkeypatch.setattr(library, "load", lambda: None)
    run = call("triton" if way == "triton" else "cpu", options)
    if remembered:
        run().sum().backward()
    with watch() as stack:
        if kernels is not None:
            for name in ("forward", "backward"):
                kernel = getattr(kernels, name)

                def launch(*arguments: Any, kernel: Any = kernel) -> Any:
                    stack.launches.append(stack.ours(sys._getframe(1)))
                    return kernel(*arguments)

                monkeypatch.setattr(kernels, name, launch)
        loss = run().sum()
    check(stack)
    with watch() as stack:
        loss.backward()
    check(stack)
