"""DSHistory: explore the history of a training run.

    import dshistory
    h = dshistory.open("history")      # or: %load_ext dshistory
    h.log()                            # the checkpoints
    h.diff(1200, 1250)                 # what changed, tensor by tensor
    h.explore()                        # a widget for all of it
    h.tensor("lm_head.weight", 1200)   # one tensor
    h.restore(1200, engine=engine)     # back to a step, bit for bit
    h.export(1200, "model.safetensors")  # for other programs

The functions `log`, `show`, `diff`, ... of this module act on the history opened last, else on `$DSHISTORY`, else on
`./history`. They, `dir` and `__all__` come from the registry of verbs when they are first used: importing this package
loads neither torch, pyarrow, duckdb nor plotly. `dir` names what a user calls; `__all__` the same without `open`,
because a star import would replace the builtin.
Type checkers read `__init__.pyi`, which is generated from the same registry.
"""

import builtins
from importlib import import_module
from importlib.util import find_spec
from typing import Any

try:
    from native._siblings import check_siblings
except ImportError as error:
    import native

    raise ImportError(
        f"DSHistory needs its own package 'native', but `import native` finds {native.__file__}: "
        "rename that file, or put it after DSHistory on sys.path"
    ) from error

check_siblings(__file__, ("native", "catalog", "capture"))

_CLASSES = {
    "Explorer": "dshistory.explorer",
    "HistoryError": "catalog.errors",
    "Report": "dshistory.display.report",
    "Table": "dshistory.display.table",
}


def load_ipython_extension(ipython: Any) -> None:
    """Load the extension, for `%load_ext dshistory`: the magics, their completion, and the name `dshistory`."""
    from dshistory.commands.magics import load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Unload the extension, for `%unload_ext dshistory`: remove everything that loading added."""
    from dshistory.commands.magics import unload

    unload(ipython)


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return getattr(import_module(_CLASSES[name]), name)
    if name == "capture":
        return import_module("capture")
    if name == "__version__":
        return import_module("importlib.metadata").version("dshistory")
    if name == "__all__":
        return sorted(name for name in __dir__() if not hasattr(builtins, name))
    # `from dshistory import SUBMODULE` asks here first; while the verbs are being loaded, they must not be asked for.
    if not name.startswith("_") and find_spec(f"dshistory.{name}") is None:
        functions = _functions()
        if name in functions:
            return functions[name]
    raise AttributeError(f"module 'dshistory' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_CLASSES, *_functions()])


def _functions() -> Any:
    from dshistory.commands.verbs import functions

    return functions()
