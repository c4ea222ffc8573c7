"""Retention beside a training: room in the budget is asked for before a snapshot is written, and made after a commit.

The first rank decides for all. After each commit its background thread removes what the policy does not keep, the parts
of all ranks, and leaves room for the next checkpoint. The training thread only does sums: what the disk had after the
last upkeep, what has been begun since, and what the next snapshot is going to take.
"""

import threading

from catalog.errors import SnapshotError
from catalog.history import History
from catalog.retention.policy import Policy
from catalog.retention.upkeep import Upkeep, Upkept
from catalog.run_writer import RunWriter

__all__ = ["Retention"]

_SPARE_BYTES = 256 << 10
"""For what grows beside the checkpoints: the journal, and folders."""


class Retention:
    """The policy of a session at work. Thread-safe; `upkeep` is for one thread.

    Nothing here raises into the training but the SnapshotError of `admit`.
    """

    def __init__(self, policy: Policy, run: RunWriter) -> None:
        self._policy = policy
        self._run = run
        self._upkeep: Upkeep | None = None
        self._changed = threading.Lock()
        self._begun: dict[int, int] = {}
        self._last: Upkept | None = None
        self._planned_bytes = 0
        self._told = ""

    @property
    def has_budget(self) -> bool:
        """Whether a snapshot must ask for room, on every rank."""
        return self._policy.budget_bytes is not None

    def admit(self, step: int, planned_bytes: int) -> bool:
        """Return whether a snapshot fits into the budget beside all that there is, and then reserve its room; False
        before the first upkeep. The other ranks leave it to the first.

        planned_bytes: the bytes of this rank's file; those of the other ranks are taken to be as many
        """
        if self._policy.budget_bytes is None or self._run.rank:
            return True
        with self._changed:
            self._planned_bytes = planned_bytes * self._run.world_size
            if self._last is None:
                return False
            nbytes = max(self._planned_bytes, self._last.next_bytes)
            begun = sum(self._begun.values())
            if self._last.used_bytes + begun + nbytes + _SPARE_BYTES > self._policy.budget_bytes:
                return False
            self._begun[step] = nbytes
            return True

    def refusal(self, step: int, planned_bytes: int) -> SnapshotError:
        """Return the error that says why a snapshot has no room."""
        with self._changed:
            found = self._last or Upkept()
            used, problem = found.used_bytes + sum(self._begun.values()), found.problem
        return SnapshotError(
            f"step {step} is not captured: the budget of keep={str(self._policy)!r} has no room for its "
            f"{planned_bytes * self._run.world_size} bytes beside {used} that stay"
            + (f": {problem}" if problem else "")
        )

    def ended(self, step: int) -> None:
        """Note that nothing of a step's snapshot is on its way any more, because it has failed or was dropped."""
        with self._changed:
            self._begun.pop(step, None)

    def upkeep(self) -> str:
        """Remove what the policy does not keep, on the first rank. Return what is to be reported and was not before."""
        if self._run.rank:
            return ""
        if self._upkeep is None:
            history = History.open(self._run.paths.root)
            self._upkeep = Upkeep(history, self._policy, run=self._run.run, journal=self._run.journal)
        with self._changed:
            begun, planned = dict(self._begun), self._planned_bytes
        committed = [step for step in begun if self._run.paths.marker(self._run.run, step).exists()]
        # A step before a committed one that is not committed itself has failed on another rank.
        ended = [step for step in begun if step <= max(committed, default=-1)]
        reserved = sum(nbytes for step, nbytes in begun.items() if step not in ended)
        found = self._upkeep(reserved_bytes=reserved + _SPARE_BYTES, next_bytes=planned)
        with self._changed:
            # Counted among what is used from here on.
            for step in ended:
                self._begun.pop(step, None)
            self._last = found
        problem = found.problem or "; ".join(found.left)
        new, self._told = problem != self._told, problem
        return problem if new else ""
