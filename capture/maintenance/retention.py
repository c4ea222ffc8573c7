"""Retention beside a training: room in the budget is asked for before a byte is written, and made after a commit.

The first rank decides for all. After a commit its background thread removes what the policy does not keep, the parts
of all ranks, and leaves room for the next checkpoint. The training thread only does sums: what the disk had after the
last upkeep, what has begun since, what the next snapshot is going to take, and what the redo log may take.

In this order the room of a budget is given away: to what is committed; to the next checkpoint; where checkpoints are
packed, to the image of one beside its data files; and then to the redo log, up to the checkpoint after the next.
"""

import collections
import threading
from collections.abc import Sequence

from catalog.errors import HistoryError, SnapshotError
from catalog.format.marker import read_marker
from catalog.history import History
from catalog.paths import HistoryPaths
from catalog.retention.policy import Policy
from catalog.retention.upkeep import Demand, Upkeep, Upkept
from catalog.run_writer import RunWriter

__all__ = ["Retention", "image_bytes"]

_LATEST = 3
"""So many latest ones tell what the redo log takes from one checkpoint to the next, and the image of a checkpoint."""

_FILE_BYTES = 64 << 10
"""The begin and the end of a file, its name, and the rest of its last block on the disk."""


def image_bytes(paths: HistoryPaths, run: str, step: int) -> int:
    """Return what the packed images of a checkpoint take at most: its bytes and, for each block, a head and a row of
    the table. A block is 1 MiB, or one extent, for which the manifest has a checksum of 16 bytes. 0 where that can't
    be read: whoever packs it finds out why."""
    total = 0
    try:
        for part in read_marker(paths, run, step).parts:
            data_bytes = (paths.root / part.data).stat().st_size
            extents = paths.manifest(run, step, part.rank).stat().st_size // 16
            total += data_bytes + (data_bytes >> 10) + 256 * extents + _FILE_BYTES
    except (HistoryError, OSError):
        return 0
    return total


class Retention:
    """The policy of a session at work. Thread-safe; `upkeep` is for one thread.

    Nothing here raises into the training but the SnapshotError of `admit`.

    compacts: whether checkpoints are packed beside the training
    """

    def __init__(self, policy: Policy, run: RunWriter, *, compacts: bool = False) -> None:
        self._policy = policy
        self._run = run
        self._compacts = compacts
        self._upkeep: Upkeep | None = None
        self._changed = threading.Lock()
        self._begun: dict[int, int] = {}
        self._last: Upkept | None = None
        self._planned_bytes = 0
        self._told = ""
        self.is_ending = False
        """True when nothing comes behind the last snapshot, so that no room is made for a redo log."""
        self._packing: tuple[int, int] | None = None
        self._image_bytes: collections.deque[int] = collections.deque(maxlen=_LATEST)
        self._redo_told: list[int] = [0] * run.world_size
        self._redo_granted = self._redo_removed = 0
        self._redo_needs: collections.deque[list[int]] = collections.deque(maxlen=_LATEST)

    @property
    def has_budget(self) -> bool:
        """Whether a snapshot must ask for room, on every rank."""
        return self._policy.budget_bytes is not None

    @property
    def can_wait(self) -> bool:
        """Whether an upkeep may come later than right after a commit, because nothing needs the room that it makes: no
        redo log, and not the next two checkpoints."""
        if self._policy.budget_bytes is None:
            return True
        with self._changed:
            if self._last is None or self._redo_granted or any(self._redo_told):
                return False
            return self._taken_bytes(self._last) + 2 * self._next_bytes(self._last) <= self._policy.budget_bytes

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
            nbytes = self._next_bytes(self._last)
            if self._taken_bytes(self._last) + nbytes > self._policy.budget_bytes:
                return False
            self._begun.pop(step, None)  # the order is that of asking, also where a load has counted the steps back
            self._begun[step] = nbytes
            return True

    def refusal(self, step: int, planned_bytes: int) -> SnapshotError:
        """Return the error that says why a snapshot has no room."""
        with self._changed:
            found = self._last or Upkept()
            used, problem = self._taken_bytes(found), found.problem
        return SnapshotError(
            f"step {step} is not captured: the budget of keep={str(self._policy)!r} has no room for its "
            f"{planned_bytes * self._run.world_size} bytes beside {used} that stay"
            + (f": {problem}" if problem else "")
        )

    def ended(self, step: int) -> None:
        """Note that nothing of a step's snapshot is on its way any more, because it has failed or was dropped."""
        with self._changed:
            self._begun.pop(step, None)

    # The redo log: what it may write, for the training thread of the first rank.

    def redo_told(self, told: Sequence[tuple[int, int]]) -> None:
        """Take note of what the redo log of each rank counts for, and has left out for want of room; none writes on
        before it is granted room again."""
        with self._changed:
            needs = [max(0, now - before + missed) for (now, missed), before in zip(told, self._redo_told, strict=True)]
            self._redo_needs.append(needs)
            self._redo_told = [now for now, _ in told]
            self._redo_granted = 0

    def redo_grants(self) -> list[int]:
        """Return how many bytes the redo log of each rank may write from now on: all that is free beside the next
        checkpoint and an image, or twice what is expected of it. Then room for the next checkpoint is made by the next
        upkeep, from older steps where it must be. It is shared as the logs have grown."""
        with self._changed:
            if self._last is None or self._policy.budget_bytes is None:
                return [0] * self._run.world_size
            free = self._policy.budget_bytes - self._taken_bytes(self._last)
            if self._last.has_image_room and self._packing is None:
                free -= max(self._image_bytes, default=0)
            free = max(0, free - self._next_bytes(self._last), min(free, 2 * self._coming_redo_bytes()))
            needs = [max(of_rank) for of_rank in zip(*self._redo_needs, strict=True)]
            # Nobody gets nothing: what a rank needs may change.
            shares = [1 + 4 * need + sum(needs) // len(needs) for need in needs]
            grants = [free * share // sum(shares) for share in shares]
            self._redo_granted = sum(grants)
            return grants

    # Images, for the thread that lets checkpoints be packed.

    def hold_image(self, step: int) -> str:
        """Reserve room for the images of a checkpoint beside its data files, until `image_ended`, and return "": or why
        there is none now."""
        if self._policy.budget_bytes is None:
            return ""
        nbytes = image_bytes(self._run.paths, self._run.run, step)
        with self._changed:
            found = self._last or Upkept()
            needed = self._taken_bytes(found) + nbytes + self._next_bytes(found)
            if self._last is None or needed > self._policy.budget_bytes:
                return (
                    f"the budget of keep={str(self._policy)!r} has no room for an image of {nbytes} bytes, beside "
                    f"{needed - nbytes} that are there or may be needed first"
                )
            self._packing = step, nbytes
            return ""

    def image_ended(self, *, saved_bytes: int = 0) -> None:
        """Note that a checkpoint takes so many bytes less now, 0 where it stays as it was. While no upkeep is under
        way."""
        with self._changed:
            self._packing = None
            if self._last is not None:
                self._last.used_bytes -= saved_bytes

    def upkeep(self) -> str:
        """Remove what the policy does not keep, on the first rank. Return what is to be reported and was not before."""
        run, paths = self._run.run, self._run.paths
        if self._run.rank:
            return ""
        if self._upkeep is None:
            history = History.open(paths.root)
            self._upkeep = Upkeep(history, self._policy, run=run, journal=self._run.journal)
        with self._changed:
            begun, planned = dict(self._begun), self._planned_bytes
        committed = [step for step in begun if paths.marker(run, step).exists()]
        if self._compacts:
            self._image_bytes.extend(image_bytes(paths, run, step) for step in committed)
        # A snapshot begun before a committed one that is not committed itself has failed on another rank.
        order = list(begun)
        ended = order[: max((order.index(step) for step in committed), default=-1) + 1]
        with self._changed:
            packing, image = self._packing or (None, 0)
            demand = Demand(
                reserved_bytes=sum(nbytes for step, nbytes in begun.items() if step not in ended) + image,
                next_bytes=planned,
                redo_bytes=sum(self._redo_told) - self._redo_removed,
                # Up to the next checkpoint, and from there to the one after it: room is made one ahead.
                coming_redo_bytes=min(self._redo_granted, self._coming_redo_bytes()) + self._coming_redo_bytes(),
                image_bytes=max(self._image_bytes, default=0) if self._compacts and packing is None else 0,
                packing=packing,
            )
        found = self._upkeep(demand)
        with self._changed:
            # Counted among what is used from here on.
            for step in ended:
                self._begun.pop(step, None)
            self._redo_removed += found.redo_removed_bytes
            self._last = found
        problem = found.problem or "; ".join(found.left)
        new, self._told = problem != self._told, problem
        return problem if new else ""

    def _coming_redo_bytes(self) -> int:
        """Return what the redo logs of all ranks are expected to take from one checkpoint to the next; 0: unknown."""
        if self.is_ending:
            return 0
        return max((sum(needs) for needs in self._redo_needs), default=0)

    def _next_bytes(self, found: Upkept) -> int:
        return max(self._planned_bytes, found.next_bytes)

    def _taken_bytes(self, found: Upkept) -> int:
        """Return what the disk has at most until something else is admitted."""
        image = 0 if self._packing is None else self._packing[1]
        redo = sum(self._redo_told) + self._redo_granted - self._redo_removed
        return found.used_bytes + sum(self._begun.values()) + image + redo
