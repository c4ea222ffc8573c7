"""The current history: the one opened last, on which the functions of the package act.

It is a convenience for the main thread: only an `open` there changes the current history. Other threads, and code that
works with several histories, use `Explorer` objects.
"""

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from catalog.errors import NotFoundError
from dshistory.explorer import Explorer
from dshistory.registry import Verb, verb

__all__ = ["current", "on_current", "open"]

_opened: list[Explorer] = []
"""Empty, or the current history alone."""


@verb("open ./history", surfaces=("magic",), needs_history=False)
def open(path: Path | str | None = None) -> Explorer:
    """Open a history and make it the current one: the functions of the module act on it from then on.

    Args:
        path: its folder; default: $DSHISTORY, else ./history
    """
    explorer = Explorer.open(_default_path() if path is None else path)
    if threading.current_thread() is threading.main_thread():
        _opened[:] = [explorer]
    return explorer


def current() -> Explorer:
    """Return the history opened last, else the default one. Raises NotFoundError, with the folder that it looked at,
    when there is none."""
    if _opened:
        return _opened[0]
    path = _default_path()
    try:
        return Explorer.open(path)
    except NotFoundError as error:
        origin = "$DSHISTORY" if os.environ.get("DSHISTORY") else "./history"
        raise NotFoundError(
            f"no history was opened, and there is none at {path} ({origin}); "
            "open one with dshistory.open(PATH) or %dshistory open PATH, or name it on the command line with -C PATH"
        ) from error


def _default_path() -> Path:
    from capture.defaults import history_path

    return history_path(None)


@functools.cache
def on_current(verb: Verb) -> Callable[..., Any]:
    """Return the verb as a function that acts on the current history, with the verb's own arguments and help."""
    if not verb.needs_history:
        return verb.function

    @functools.wraps(verb.function)
    def function(*args: Any, **kwargs: Any) -> Any:
        return verb.function(current(), *args, **kwargs)

    function.__signature__ = verb.signature  # type: ignore[attr-defined]
    function.__qualname__ = verb.attribute
    return function
