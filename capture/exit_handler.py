"""The exit handler of whatever writes in the background: sessions and DeepSpeed checkpoint engines."""

import atexit
import os
import warnings
import weakref
from collections.abc import Callable
from typing import TypeVar

from catalog.errors import HistoryError

__all__ = ["call_at_exit"]

_Owner = TypeVar("_Owner")


def call_at_exit(owner: _Owner, action: Callable[[_Owner], None]) -> None:
    """Call `action(owner)` when the interpreter exits, if `owner` is still alive then; it is not kept alive.

    A HistoryError becomes a warning, since nobody can catch it any more. In a forked child nothing is called: its copy
    of the owner must not write into the files of its parent.
    """
    reference, process = weakref.ref(owner), os.getpid()

    def call() -> None:
        alive = reference()
        if alive is None or os.getpid() != process:
            return
        try:
            action(alive)
        except HistoryError as error:
            warnings.warn("\n".join([str(error), *getattr(error, "__notes__", ())]), stacklevel=1)

    atexit.register(call)
