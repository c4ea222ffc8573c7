"""The open session and the origin (the checkpoint it was restored from) of each live object. Keeps nothing alive."""

import weakref
from collections.abc import Sequence
from typing import Any

from capture.collectives import Ranks
from capture.session.session import Session
from capture.user_warning import warn_user
from catalog.records import CheckpointRef

__all__ = ["close_sessions", "note_origin", "origin_of", "register_session", "sessions_of"]

_sessions: weakref.WeakKeyDictionary[Any, weakref.ref[Session]] = weakref.WeakKeyDictionary()
_origins: weakref.WeakKeyDictionary[Any, CheckpointRef] = weakref.WeakKeyDictionary()


def sessions_of(subjects: Sequence[Any]) -> list[Session]:
    """Return the sessions that any of these live objects was last enabled with, each once."""
    found = (_sessions[subject]() for subject in subjects if subject in _sessions)
    return list({id(session): session for session in found if session is not None}.values())


def close_sessions(sessions: Sequence[Session], *, ranks: Ranks, consequence: str | None = None) -> None:
    """Close sessions; when this returns those of all ranks are closed, and what fails on one fails on all.

    All ranks call it. `consequence` says of the run of a session that is still open what happens, and what to do: that
    is a warning, on the first rank. None: there is nothing to warn of.
    """

    def close() -> None:
        for session in sessions:
            if session.is_open and ranks.rank == 0 and consequence is not None:
                warn_user(f"the session of run {session.run} {consequence}")
            session.close()

    ranks.agree("closing the session before", close)


def register_session(subjects: Sequence[Any], session: Session) -> None:
    """Make `session` the session of these objects."""
    for subject in subjects:
        _sessions[subject] = weakref.ref(session)
        _origins.pop(subject, None)


def origin_of(subjects: Sequence[Any]) -> CheckpointRef | None:
    """Return the checkpoint that the first of these was restored from since it was last enabled: the parent of its next
    run.
    """
    return next((_origins[subject] for subject in subjects if subject in _origins), None)


def note_origin(subjects: Sequence[Any], ref: CheckpointRef) -> None:
    """Note that these objects hold the state of `ref` now."""
    for subject in subjects:
        _origins[subject] = ref
