"""A request to the training that calls `capture.enable` next: to be the replay of a step.

A function of this process asks with `asking`. The command line, which starts a user's own script, asks through the
environment variable DSHISTORY_REPLAY, which a launcher hands on to every rank.
"""

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from capture.replays.change import Change
from catalog.errors import SetupError
from catalog.records import CheckpointRef

__all__ = ["VARIABLE", "ReplayRequest", "asked_replay", "asking"]

VARIABLE: Final = "DSHISTORY_REPLAY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """A replay to be made.

    id: names the replay in the facts of its run, so that whoever asked finds it
    history: the folder of the history, in which the child run is captured too
    ref: the checkpoint to begin with
    until: the last step
    capture_at: further steps to capture: those of the run that is replayed
    batches_per_step: how many batches make a step
    leaves_out: whether the training's data loader leaves out the batches of `change.skip_batches`; False: who asked
       leaves them out itself
    on_step: is called after each step with the step and the names of its metrics
    """

    id: str
    history: Path
    ref: CheckpointRef
    until: int
    change: Change
    capture_at: frozenset[int] = frozenset()
    batches_per_step: int = 1
    leaves_out: bool = True
    on_step: Callable[[int, Collection[str]], None] | None = None

    def facts(self) -> dict[str, Any]:
        """Return JSON for run.json."""
        return {"id": self.id, "of": str(self.ref), "until": self.until, "change": self.change.as_json()}

    def to_environment(self) -> str:
        """Return the request as the value of the environment variable. A change that is a function can't be given."""
        assert self.change.function is None, "a function has no text"
        fields = {
            "id": self.id,
            "history": str(self.history),
            "run": self.ref.run,
            "step": self.ref.step,
            "until": self.until,
            "change": self.change.as_json(),
            "capture_at": sorted(self.capture_at),
            "batches_per_step": self.batches_per_step,
        }
        return json.dumps(fields)


_asked: ContextVar[ReplayRequest | None] = ContextVar("asked", default=None)


@contextlib.contextmanager
def asking(request: ReplayRequest) -> Iterator[None]:
    """Let the first `capture.enable` in this block make the replay."""
    token = _asked.set(request)
    try:
        yield
    finally:
        _asked.reset(token)


def asked_replay() -> ReplayRequest | None:
    """Return the replay that is asked for, once: a script that enables a second time goes on as it would otherwise.

    SetupError when the environment variable holds anything but a request.
    """
    request = _asked.get()
    if request is not None:
        _asked.set(None)
        return request
    text = os.environ.pop(VARIABLE, None)
    return None if text is None else _parse(text)


def _parse(text: str) -> ReplayRequest:
    try:
        fields = json.loads(text)
        return ReplayRequest(
            id=str(fields["id"]),
            history=Path(fields["history"]),
            ref=CheckpointRef(str(fields["run"]), int(fields["step"])),
            until=int(fields["until"]),
            change=Change.of(fields["change"]),
            capture_at=frozenset(map(int, fields["capture_at"])),
            batches_per_step=int(fields["batches_per_step"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{VARIABLE} holds no replay, it is made by `dshistory replay`: unset it: {error}") from error
