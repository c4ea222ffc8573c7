"""The upkeep of a run by its own session: what a policy does not keep is removed, beside the training.

A training that was resumed is a run and the dead runs that it goes on from. Those that were captured with the same
policy are kept up together with it, as one training; all others are left alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace

from catalog.access.locked_run import locked_run
from catalog.errors import HistoryError, SetupError
from catalog.format.journal import Journal
from catalog.history import History
from catalog.retention.choice import Choice, beyond, choose
from catalog.retention.facts import CheckpointFacts, FactsReader, bytes_on_disk
from catalog.retention.policy import Policy
from catalog.retention.redo_segments import SegmentFacts, remove_segments, segment_facts
from catalog.retention.removal import remove_checkpoints, retention_journal

__all__ = ["FACT", "Demand", "Upkeep", "Upkept"]

FACT = "keep"
"""The fact of a run that has the words of its policy."""

_LATEST = 3
"""The next checkpoint takes as much as the largest of so many latest ones: deduplication makes later ones smaller."""

_SPARE_BYTES = 256 << 10
_MERGED_BYTES = 32 << 20
"""Until the next upkeep, journals and fingerprints may become twice as large, since a merged segment is written before
those that it replaces go; by at most so much for each rank, and by a little where there is hardly anything yet."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Says what a session needs room for beside what is committed.

    reserved_bytes: what is on its way, such as the snapshots that have begun
    next_bytes: what the next checkpoint is planned to take
    redo_bytes: what its redo log counts for, published or not
    coming_redo_bytes: what the redo log may take up to the next checkpoint
    image_bytes: what the image of a checkpoint takes at most that is to be packed; 0 where none is
    packing: the step of which an image is being made, which is part of `reserved_bytes`
    """

    reserved_bytes: int = 0
    next_bytes: int = 0
    redo_bytes: int = 0
    coming_redo_bytes: int = 0
    image_bytes: int = 0
    packing: int | None = None


@dataclass(slots=True)
class Upkept:
    """Says what an upkeep has found and done.

    used_bytes: what the training's runs take now and may take for their journals until the next upkeep, without what is
       not committed, and without the redo log of the run that is written
    next_bytes: what a checkpoint takes, by the largest there is
    has_image_room: whether room is left for the image of a checkpoint too
    redo_removed_bytes: what was removed of the redo log of the run that is written
    problem: why the policy can't be met, "" when it is
    """

    used_bytes: int = 0
    next_bytes: int = 0
    has_image_room: bool = False
    removed: int = 0
    redo_removed_bytes: int = 0
    problem: str = ""
    left: list[str] = field(default_factory=list)


class Upkeep:
    """Keeps up one run, which the caller writes, and the dead ones that it goes on from. For one thread."""

    def __init__(self, history: History, policy: Policy, *, run: str, journal: Journal) -> None:
        self._history = history
        self._policy = policy
        self._run = run
        self._journal = journal
        self._reader = FactsReader(history)

    def __call__(self, demand: Demand) -> Upkept:
        """Remove what the policy does not keep, so that the demand and one more checkpoint find room in its budget.

        Where that can't be, what the rules keep stays, as far as it fits by itself, and the problem is told. Raises
        what the history raises when it can't be read.
        """
        # Tags are in the journal of this process until it is written.
        self._journal.flush()
        done = Upkept()
        with self._training(demand.packing) as lines:
            own = [one for of_run in lines.values() for one in of_run if not one.damage]
            done.next_bytes = max([demand.next_bytes, *(one.nbytes for one in own[-_LATEST:])])
            redo = [one for run in lines for one in segment_facts(self._history.paths, run)]
            other = self._other_bytes(lines)
            choice = self._chosen(done, lines, redo, demand, other)
            for run, facts in reversed(lines.items()):
                self._remove(done, run, facts, choice)
            paths = self._history.paths
            done.used_bytes += sum(one.nbytes for run in lines if run != self._run for one in segment_facts(paths, run))
        done.used_bytes += other
        return done

    def _chosen(
        self,
        done: Upkept,
        lines: dict[str, list[CheckpointFacts]],
        redo: Sequence[SegmentFacts],
        demand: Demand,
        other: int,
    ) -> Choice:
        """Choose so that as much of the demand as can be finds room: the image of a checkpoint gives way first."""
        line = [one for of_run in lines.values() for one in of_run]
        if self._policy.budget_bytes is None:
            return choose([line], self._policy)
        published = sum(one.nbytes for one in redo if one.run == self._run)
        fixed = other + demand.reserved_bytes + max(0, demand.redo_bytes - published)
        coming = demand.coming_redo_bytes
        if demand.image_bytes:
            with suppress(SetupError):
                more = fixed + done.next_bytes + demand.image_bytes
                choice = choose([line], self._policy, more_bytes=more, redo=redo, coming_redo_bytes=coming)
                done.has_image_room = True
                return choice
        for more in (fixed + done.next_bytes, fixed):
            try:
                return choose([line], self._policy, more_bytes=more, redo=redo, coming_redo_bytes=coming)
            except SetupError as error:
                done.problem = str(error)
        without = replace(self._policy, budget_bytes=None)
        return choose([line], without) if without.rules else Choice({}, {})

    def _remove(self, done: Upkept, run: str, facts: Sequence[CheckpointFacts], choice: Choice) -> None:
        paths, journal = self._history.paths, self._journal if run == self._run else None
        segments = [one for one in choice.redo if one.run == run]
        freed = 0
        if segments:
            own = journal or retention_journal(paths, run)
            freed = remove_segments(paths, segments, beyond(self._policy), journal=own)
        removed = [one for one in facts if one.ref in choice.removed]
        result = remove_checkpoints(paths, removed, choice.removed, journal=journal)
        done.removed += len(result.checkpoints)
        done.left += [f"{ref}: {reason}" for ref, reason in result.left.items()]
        gone = set(result.checkpoints)
        done.used_bytes += sum(one.nbytes for one in facts if one.ref not in gone)
        if run == self._run:
            done.redo_removed_bytes = freed + result.redo_bytes

    @contextmanager
    def _training(self, packing: int | None) -> Iterator[dict[str, list[CheckpointFacts]]]:
        """Yield the facts of the training's runs, oldest first; the dead ones are locked until the end of the body."""
        with ExitStack() as locks:
            runs = [self._run, *self._ancestors(locks)]
            within = frozenset(runs)
            yield {
                run: self._reader.line(run, within=within, packing=packing if run == self._run else None)
                for run in reversed(runs)
            }

    def _ancestors(self, locks: ExitStack) -> Iterator[str]:
        facts = self._history.run_facts(self._run)
        seen = {self._run}
        while facts.parent_run is not None and facts.parent_run not in seen:
            seen.add(facts.parent_run)
            try:
                facts = self._history.run_facts(facts.parent_run)
                if facts.facts.get(FACT) != str(self._policy):
                    return
                if not locks.enter_context(locked_run(self._history.paths, facts.run)):
                    return
            except (HistoryError, OSError):
                # What can't be read or locked is left alone, and what it goes on from too.
                return
            yield facts.run

    def _other_bytes(self, lines: dict[str, list[CheckpointFacts]]) -> int:
        """Return what the runs take beside their checkpoints and redo logs, such as journals, and what these may take
        more until the next upkeep: journals are merged, and statistics come later than their checkpoints."""
        paths = self._history.paths
        own = bytes_on_disk(paths.run_dir(self._run), but=_IN_FLIGHT.__contains__)
        own -= sum(one.statistics_bytes for one in lines[self._run])
        dead = sum(bytes_on_disk(paths.run_dir(run), but="redo".__eq__) for run in lines if run != self._run)
        dead -= sum(one.nbytes for run, line in lines.items() if run != self._run for one in line)
        world_size = self._history.run_facts(self._run).world_size
        more = _SPARE_BYTES + min(max(0, own), _MERGED_BYTES * world_size)
        checkpoints = [one for line in lines.values() for one in line]
        most = max((one.statistics_bytes for one in checkpoints), default=0)
        late = sum(most - one.statistics_bytes for one in checkpoints if one.healthy is None)
        return max(0, own) + max(0, dead) + more + late


_IN_FLIGHT = frozenset({"steps", "redo"})
"""The folders of a run in which there is also what is not committed yet, and is counted by whoever writes it."""
