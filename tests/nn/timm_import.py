"""Import of timm without torchvision.

timm imports torchvision for image transforms, which the tests do not use. The wheels of torchvision
on PyPI need the CUDA build of torch, and a torchvision that cannot be imported also breaks
transformers. While timm is imported here, torchvision is a package of empty classes.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


class _Names(type):
    """Class of which every attribute is another empty class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Names(name, (), {})
        setattr(cls, name, value)
        return value


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(_Names(self.__name__, (), {}), name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_torchvision = name.partition(".")[0] == "torchvision"
        return ModuleSpec(name, self, is_package=True) if is_torchvision else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def load_timm() -> Any:
    """The package timm; the test is skipped if it is not installed."""
    if "timm" not in sys.modules and find_spec("torchvision") is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        try:
            pytest.importorskip("timm")
        finally:
            sys.meta_path.remove(finder)
            for name in [each for each in sys.modules if each.startswith("torchvision")]:
                del sys.modules[name]
    return pytest.importorskip("timm")
