"""Goes on from the newest checkpoint that verifies. Every rank reads its share of the bytes, so that none waits long
in a collective for another: a timeout there would end the job, however sound the checkpoint is.
"""

import sys
import time
from collections.abc import Sequence
from functools import partial

from capture.collectives import Ranks
from capture.load.whole_state import require_whole_state
from capture.restore import restore_live
from capture.state.interface import StateProvider
from capture.user_warning import warn_user
from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.references import lineage

__all__ = ["resume_newest"]

_SAY_EVERY_S = 10.0
_HELD_PATIENCE_S = 2.0
_LOOK_S = 0.01


def resume_newest(history: History, ranks: Ranks, providers: Sequence[StateProvider]) -> CheckpointRef | None:
    """Restore the newest checkpoint of the current run's lineage that verifies, and return it; None when there is none.

    All ranks call it. Damage that any of them finds makes all of them go on with the checkpoint before. SetupError when
    the run is still being written, MismatchError when it holds weights only.
    """
    newest_first = ranks.broadcast(
        ranks.agree("choosing a checkpoint", lambda: _candidates(history) if ranks.rank == 0 else None)
    )
    for run, step in newest_first:
        ref = CheckpointRef(run, step)
        found = ranks.gather(ranks.agree(f"verifying checkpoint {ref}", partial(_problem, history, ref, ranks)))
        problem = next((one for one in found if one is not None), None)
        if problem is None:
            restore_live(history, ref, ranks=ranks, providers=providers, whole=True, verify=False)
            return ref
        if ranks.rank == 0:
            warn_user(f"resume: checkpoint {ref} is passed over, because it does not verify: {problem}")
    return None


def _candidates(history: History) -> list[tuple[str, int]]:
    try:
        run = history.current_run()
        candidates = lineage(history.paths, run)
    except NotFoundError:
        return []
    if _goes_on_being_held(history, run):
        raise SetupError(
            f"resume: run {run} of {history.root} is still being written, by another process or by a session here: end "
            "it first, or name another history"
        )
    if candidates:
        require_whole_state(history, candidates[-1])
    return [(ref.run, ref.step) for ref in reversed(candidates)]


def _goes_on_being_held(history: History, run: str) -> bool:
    """Return whether a process writes a run; not where somebody holds it only to look after its leftovers, as every
    training does that begins in the same history."""
    deadline = time.monotonic() + _HELD_PATIENCE_S
    while held := history.held(run):
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)
    return held


def _problem(history: History, ref: CheckpointRef, ranks: Ranks) -> str | None:
    """Verify this rank's share and return its first problem."""
    from catalog.verify import verify

    said = _Progress(ref, ranks)
    problems = verify(history, [ref], share=(ranks.rank, ranks.world_size), progress=said.advance)
    return f"{problems[0].file}: {problems[0].field}: {problems[0].message}" if problems else None


class _Progress:
    """Lines on rank 0's stderr while a checkpoint is verified, so that nobody takes a long one for a hang."""

    def __init__(self, ref: CheckpointRef, ranks: Ranks) -> None:
        self._ref = ref
        self._ranks = ranks
        self._read = 0
        self._said = time.monotonic()

    def advance(self, nbytes: int) -> None:
        self._read += nbytes
        now = time.monotonic()
        if self._ranks.rank == 0 and now - self._said >= _SAY_EVERY_S:
            self._said = now
            each = f", as {self._ranks.world_size - 1} other ranks do" if self._ranks.world_size > 1 else ""
            sys.stderr.write(f"resume: verifying checkpoint {self._ref}: {self._read / 1e9:.1f} GB read{each}\n")
