"""What is being captured right now, and what a live object was last restored from. Weak: it keeps nothing alive."""

import weakref
from typing import Any

from capture.session import Session
from catalog.records import CheckpointRef

__all__ = ["note_origin", "origin_of", "register_session", "session_of"]

_sessions: weakref.WeakKeyDictionary[Any, weakref.ref[Session]] = weakref.WeakKeyDictionary()
_origins: weakref.WeakKeyDictionary[Any, CheckpointRef] = weakref.WeakKeyDictionary()


def session_of(target: Any) -> Session | None:
    """The session that `target` was last enabled with."""
    reference = _sessions.get(target)
    return None if reference is None else reference()


def register_session(target: Any, session: Session) -> None:
    """From now on `session` is the one of `target`."""
    _sessions[target] = weakref.ref(session)
    _origins.pop(target, None)


def origin_of(target: Any) -> CheckpointRef | None:
    """The checkpoint that `target` was restored from since it was last enabled: the parent of its next run."""
    return _origins.get(target)


def note_origin(target: Any, ref: CheckpointRef) -> None:
    """`target` holds the state of `ref` now."""
    _origins[target] = ref
