"""The doors of `capture` are functions and classes that are imported from their modules at their first use."""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["open_lazily"]


class _LazyPackage(ModuleType):
    """A package that looks up its public names when they are asked for, and whose functions win over its submodules.

    Python binds every imported submodule to its package under the submodule's name. Where a function has the same name,
    as `capture.enable` in `capture/enable.py`, the attribute would be the function or the module depending on what was
    imported first. Here it is always the function.
    """

    _homes: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        if name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = self.__dict__[name] = getattr(import_module(self._homes[name]), name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}" and name in self._homes:
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """Return the public names, without the submodules that happen to be imported."""
        own = [name for name in self.__dict__ if name.startswith("__") and name.endswith("__")]
        return sorted({*own, *self._homes})


def open_lazily(package: str, homes: Mapping[str, str]) -> None:
    """Make every name of `homes` an attribute of `package` that is imported from the module beside it at its first use.

    Call it once, in the package's `__init__`.
    """
    module = sys.modules[package]
    module.__dict__["_homes"] = dict(homes)
    module.__class__ = _LazyPackage
