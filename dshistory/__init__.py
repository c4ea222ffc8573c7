"""DSHistory: look into the history of a training run.

    import dshistory
    h = dshistory.open("history")      # or: %load_ext dshistory
    h.log()                            # the checkpoints
    h.diff(1200, 1250)                 # what changed, tensor by tensor
    h.explore()                        # all of it, to look around in
    h.tensor("lm_head.weight", 1200)   # one tensor
    h.restore(1200, engine=engine)     # back to a step, bit for bit
    h.export(1200, "model.safetensors")  # for other programs

The functions `log`, `show`, `diff`, ... of this module act on the history opened last, else on `$DSHISTORY`, else on
`./history`. `open` is not in `__all__`: a star import would replace the builtin. Importing this package loads neither
torch, duckdb nor plotly.
"""

import importlib
from typing import TYPE_CHECKING, Any

try:
    from native._siblings import check_siblings
except ImportError as error:
    import native

    raise ImportError(
        f"DSHistory needs its own package 'native', but `import native` finds {native.__file__}: "
        "rename that file, or put it after DSHistory on sys.path"
    ) from error

check_siblings(__file__, ("native", "catalog", "capture"))

if TYPE_CHECKING:
    import capture
    from catalog.errors import HistoryError
    from dshistory.commands.doctor import doctor
    from dshistory.conversion.importing import import_checkpoint
    from dshistory.current import (
        analyze,
        anomalies,
        bisect,
        diff,
        distances,
        explore,
        export,
        histogram,
        layers,
        log,
        reindex,
        restore,
        show,
        sql,
        tags,
        tensor,
        trajectory,
        verify,
        watch,
    )
    from dshistory.current import open as open
    from dshistory.display.report import Report
    from dshistory.display.table import Table
    from dshistory.explorer import Explorer

__all__ = [
    "Explorer",
    "HistoryError",
    "Report",
    "Table",
    "analyze",
    "anomalies",
    "bisect",
    "capture",
    "diff",
    "distances",
    "doctor",
    "explore",
    "export",
    "histogram",
    "import_checkpoint",
    "layers",
    "load_ipython_extension",
    "log",
    "reindex",
    "restore",
    "show",
    "sql",
    "tags",
    "tensor",
    "trajectory",
    "unload_ipython_extension",
    "verify",
    "watch",
]

_HOMES = {
    "Explorer": "dshistory.explorer",
    "HistoryError": "catalog.errors",
    "Report": "dshistory.display.report",
    "Table": "dshistory.display.table",
    "doctor": "dshistory.commands.doctor",
    "import_checkpoint": "dshistory.conversion.importing",
    **dict.fromkeys(
        (
            "analyze",
            "anomalies",
            "bisect",
            "diff",
            "distances",
            "explore",
            "export",
            "histogram",
            "layers",
            "log",
            "open",
            "reindex",
            "restore",
            "show",
            "sql",
            "tags",
            "tensor",
            "trajectory",
            "verify",
            "watch",
        ),
        "dshistory.current",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "capture":
        value = importlib.import_module("capture")
    elif name == "__version__":
        value = importlib.import_module("importlib.metadata").version("dshistory")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "capture"})


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext dshistory`: the magics `%dshistory` and `%%dshistory`, their completion, and the name `dshistory`."""
    from dshistory.commands.magics import load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """`%unload_ext dshistory`: takes back everything that loading brought."""
    from dshistory.commands.magics import unload

    unload(ipython)
