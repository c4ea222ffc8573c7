"""Warns the user at the user's own line: the first frame that is neither ours nor of a library that calls our hooks."""

import sys
import warnings
from types import FrameType

__all__ = ["warn_user"]

_BETWEEN = frozenset(
    {"dshistory", "capture", "catalog", "native"}
    | {"torch", "deepspeed", "accelerate", "transformers", "contextlib", "functools"}
)
"""The packages whose frames may stand between the user's line and the warning."""


def warn_user(message: str) -> None:
    """Warn (UserWarning). A thread has no line of the user: there it is the caller's."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level if frame is not None else 2)
