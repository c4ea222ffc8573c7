"""The history opened last: what the module's own functions act on.

A convenience of the main thread: only an `open` there makes its history the current one. Other code and other threads
use the object.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, TypeVar

from catalog.errors import NotFoundError
from dshistory.explorer import Explorer

__all__ = [
    "analyze",
    "anomalies",
    "bisect",
    "current",
    "default_path",
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
]

P = ParamSpec("P")
R = TypeVar("R")

_opened: list[Explorer] = []


def default_path() -> Path:
    """Where the history is when nobody says: $DSHISTORY, else ./history."""
    return Path(os.environ.get("DSHISTORY") or "history")


def open(path: Path | str | None = None) -> Explorer:
    """Open a history for looking; the module's functions act on it from then on.

    Args:
        path: its folder; default: $DSHISTORY, else ./history
    """
    explorer = Explorer.open(default_path() if path is None else path)
    if threading.current_thread() is threading.main_thread():
        _opened[:] = [explorer]
    return explorer


def current() -> Explorer:
    """The history opened last, else the default one. Raises NotFoundError, saying where it looked, when there is
    none."""
    if _opened:
        return _opened[0]
    try:
        return Explorer.open(default_path())
    except NotFoundError as error:
        place = "$DSHISTORY" if os.environ.get("DSHISTORY") else "./history"
        raise NotFoundError(
            f"no history was opened, and there is none at {default_path().absolute()} ({place}); "
            "open one with dshistory.open(PATH) or %dshistory open PATH, or name it on the command line with -C PATH"
        ) from error


def _on_current(method: Callable[Concatenate[Explorer, P], R]) -> Callable[P, R]:
    """The method as a function on the current history, with the same arguments and help."""

    @functools.wraps(method)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(current(), *args, **kwargs)

    signature = inspect.signature(method)
    without_self = list(signature.parameters.values())[1:]
    function.__signature__ = signature.replace(parameters=without_self)  # type: ignore[attr-defined]
    function.__qualname__ = method.__name__
    return function


log: Final = _on_current(Explorer.log)
show: Final = _on_current(Explorer.show)
diff: Final = _on_current(Explorer.diff)
trajectory: Final = _on_current(Explorer.trajectory)
layers: Final = _on_current(Explorer.layers)
histogram: Final = _on_current(Explorer.histogram)
explore: Final = _on_current(Explorer.explore)
watch: Final = _on_current(Explorer.watch)
distances: Final = _on_current(Explorer.distances)
anomalies: Final = _on_current(Explorer.anomalies)
bisect: Final = _on_current(Explorer.bisect)
tensor: Final = _on_current(Explorer.tensor)
tags: Final = _on_current(Explorer.tags)
restore: Final = _on_current(Explorer.restore)
export: Final = _on_current(Explorer.export)
sql: Final = _on_current(Explorer.sql)
analyze: Final = _on_current(Explorer.analyze)
verify: Final = _on_current(Explorer.verify)
reindex: Final = _on_current(Explorer.reindex)
