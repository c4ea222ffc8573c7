"""Replays a step in a user's own script: starts it with a request in its environment, which `capture.enable` takes."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from capture.replays.change import Change
from capture.replays.request import VARIABLE, ReplayRequest
from catalog.errors import SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.display.progress import CountProgress
from dshistory.replays.followed import Followed, losses_of
from dshistory.replays.replay import beside, has_position, request_for
from dshistory.replays.result import ReplayTable, compared_with

__all__ = ["launch"]

_LOOK_EVERY_S = 1.0


def launch(
    history: History,
    ref: CheckpointRef,
    *,
    command: Sequence[str],
    until: int | None,
    also_at: frozenset[int] = frozenset(),
    change: Change,
    batches_per_step: int,
    quiet: bool,
) -> ReplayTable:
    """Run `command`, wait for it, and compare the run that it made with the one that it replays.

    Its output is not touched. Ctrl-C reaches it too; what it has captured stays. SetupError when it can't be started,
    has called no `capture.enable`, or has failed.
    """
    if not command:
        raise SetupError("replay: behind -- there is no command, as: -- python train.py")
    if change.function is not None:
        raise SetupError("replay: a change that is a function can't be handed to another program: pass train_step=")
    followed = Followed(history, ref)
    request = request_for(followed, until=until, also_at=also_at, change=change, batches_per_step=batches_per_step)
    if not has_position(history, ref):
        sys.stderr.write(
            f"replay: {ref} has no position of a data loader: unless the script itself finds the batches of step "
            f"{ref.step + 1}, they are others; capture with capture.enable(..., dataloader=loader)\n"
        )
    environment = {**os.environ, VARIABLE: request.to_environment()}
    try:
        process = subprocess.Popen(list(command), env=environment)
    except OSError as error:
        raise SetupError(f"replay: {command[0]!r} can't be started: {error}") from error
    try:
        _watch(process, followed, request, quiet=quiet)
    except KeyboardInterrupt:
        process.wait()
        raise
    run = _run_of(history, request)
    if run is None:
        raise SetupError(
            f"replay: {' '.join(command)!r} ended with status {process.returncode} and made no replay: does it call "
            "capture.enable?"
        )
    if process.returncode:
        raise SetupError(
            f"replay: {' '.join(command)!r} failed with status {process.returncode}; what it captured is run {run}"
        )
    return compared_with(followed, run, change=change)


def _watch(process: "subprocess.Popen[bytes]", followed: Followed, request: ReplayRequest, *, quiet: bool) -> None:
    """Wait for the process, with a bar where somebody sees it."""
    before, made = followed.losses(), request.ref.step
    with CountProgress(request.until - made, description=f"replay {request.ref}", quiet=quiet, unit="step") as bar:
        while bar.is_shown and process.poll() is None:
            time.sleep(_LOOK_EVERY_S)
            run = _run_of(followed.history, request)
            losses = {} if run is None else losses_of(followed.history, run)
            if losses and (last := max(losses)) > made:
                bar.describe(beside(losses[last], before.get(last)))
                bar.advance(last - made)
                made = last
        process.wait()


def _run_of(history: History, request: ReplayRequest) -> str | None:
    for facts in reversed(history.runs()):
        replay = facts.facts.get("replay")
        if isinstance(replay, dict) and replay.get("id") == request.id:
            return facts.run
    return None
