"""Makes importing a package cheap: its public names are imported from their modules at the first use.

The packages above use it. It stands here because they must not import anything heavier than this to use it.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["export_lazily"]


class _LazyPackage(ModuleType):
    """A package that looks up its public names when they are asked for, and whose functions win over its submodules.

    Python binds every imported submodule to its package under the submodule's name. Where a function has the same name,
    as `capture.enable` in `capture/enable.py`, the attribute would be the function or the module depending on what was
    imported first. Here it is always the function.
    """

    _homes: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        value: Any
        if name == "__version__":
            # Importing importlib.metadata takes longer than the rest of a package's import together.
            value = import_module("importlib.metadata").version("dshistory")
        elif name in self._homes:
            home = import_module(self._homes[name])
            value = home if home.__name__ == name else getattr(home, name)
        else:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}" and name in self._homes:
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """The public names, without the submodules that happen to be imported."""
        own = [name for name in self.__dict__ if name.startswith("__") and name.endswith("__")]
        return sorted({*own, *self._homes, *self.__dict__.get("__all__", ())})


def export_lazily(package: str, homes: Mapping[str, str]) -> None:
    """Make every name of `homes` an attribute of `package` that is imported from the module beside it at its first use.

    A name whose home is a top-level module of that very name stands for the module. `__version__` is the version of the
    installed distribution. Call it once, in the package's `__init__`, after `__all__`.
    """
    module = sys.modules[package]
    module.__dict__["_homes"] = dict(homes)
    module.__class__ = _LazyPackage
