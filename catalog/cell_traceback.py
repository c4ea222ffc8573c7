"""The traceback of an error in a notebook's cell: the user's own lines and the message, without our frames."""

import linecache
import sys
import traceback
from collections.abc import Iterator
from types import FrameType

__all__ = ["cell_traceback"]

_NOT_THE_USERS = frozenset(
    {"dshistory", "capture", "catalog", "native", "IPython", "ipykernel", "asyncio", "contextlib", "functools"}
    | {"threading", "torch", "deepspeed", "accelerate", "transformers"}
)
"""The packages of frames that are left out."""


def cell_traceback(error: BaseException) -> list[str]:
    """Return the lines that IPython shows for an error: where the user's code raised it, and what it says.

    An error of the user's own code that caused it comes first, with its place. After `%xmode Verbose` the traceback is
    whole."""
    if _wants_all():
        return traceback.format_exception(error)
    lines: list[str] = []
    cause = error.__cause__
    if cause is not None and (places := list(_places(cause))):
        lines += [*places, f"{type(cause).__name__}: {cause}", ""]
    return [*lines, *_places(error), f"{type(error).__name__}: {error}"]


def _places(error: BaseException) -> Iterator[str]:
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_USERS:
            yield f"{_named(frame)}, line {number}:"
            yield f"    {linecache.getline(frame.f_code.co_filename, number).strip()}"


def _named(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    return "in a cell" if name.startswith("<ipython-input") or "ipykernel_" in name else f"in {name}"


def _wants_all() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and getattr(shell.InteractiveTB, "mode", "") == "Verbose"
