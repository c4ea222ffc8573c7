"""The upkeep of a run by its own session: what a policy does not keep is removed, beside the training.

A training that was resumed is a run and the dead runs that it goes on from. Those that were captured with the same
policy are kept up together with it, as one training; all others are left alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from catalog.errors import HistoryError, SetupError
from catalog.format.journal import Journal
from catalog.history import History
from catalog.read.locked_run import locked_run
from catalog.records import CheckpointRef
from catalog.retention.choice import choose
from catalog.retention.facts import CheckpointFacts, FactsReader, bytes_on_disk
from catalog.retention.policy import Policy
from catalog.retention.removal import remove_checkpoints

__all__ = ["FACT", "Upkeep", "Upkept"]

FACT = "keep"
"""The fact of a run that has the words of its policy."""

_LATEST = 3
"""The next checkpoint takes as much as the largest of so many latest ones: deduplication makes later ones smaller."""


@dataclass(slots=True)
class Upkept:
    """What an upkeep has found and done. used_bytes: what the training's runs take now, without what is not committed;
    next_bytes: what a checkpoint takes, by the largest there is; problem: why the policy can't be met, "" when it
    is."""

    used_bytes: int = 0
    next_bytes: int = 0
    removed: int = 0
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

    def __call__(self, *, reserved_bytes: int, next_bytes: int = 0) -> Upkept:
        """Remove what the policy does not keep, so that `reserved_bytes` and one more checkpoint find room in its
        budget.

        Where that can't be, what the rules keep stays, as far as it fits by itself, and the problem is told. Raises
        what the history raises when it can't be read.
        """
        # Tags are in the journal of this process until it is written.
        self._journal.flush()
        done = Upkept()
        with self._training() as lines:
            line = [one for of_run in lines.values() for one in of_run]
            own = [one for one in line if not one.damage]
            done.next_bytes = max([next_bytes, *(one.nbytes for one in own[-_LATEST:])])
            # Statistics come later than their checkpoints.
            late = sum(max(0, done.next_bytes - one.nbytes) for one in own[-_LATEST:] if one.healthy is None)
            other = self._other_bytes(lines) + late
            removed: Mapping[CheckpointRef, str] = {}
            for more in (other + reserved_bytes + done.next_bytes, other + reserved_bytes, None):
                policy = self._policy if more is not None else replace(self._policy, budget_bytes=None)
                try:
                    if policy.rules or policy.budget_bytes is not None:
                        removed = choose([line], policy, more_bytes=more or 0).removed
                    break
                except SetupError as error:
                    done.problem = str(error)
            for run, facts in reversed(lines.items()):
                result = remove_checkpoints(
                    self._history.paths,
                    [one for one in facts if one.ref in removed],
                    removed,
                    journal=self._journal if run == self._run else None,
                )
                done.removed += len(result.checkpoints)
                done.left += [f"{ref}: {reason}" for ref, reason in result.left.items()]
                gone = set(result.checkpoints)
                done.used_bytes += sum(one.nbytes for one in facts if one.ref not in gone)
        done.used_bytes += other
        return done

    @contextmanager
    def _training(self) -> Iterator[dict[str, list[CheckpointFacts]]]:
        """Yield the facts of the training's runs, oldest first; the dead ones are locked until the end of the body."""
        with ExitStack() as locks:
            runs = [self._run, *self._ancestors(locks)]
            within = frozenset(runs)
            yield {run: self._reader.line(run, within=within) for run in reversed(runs)}

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
        """Return what the runs take beside their checkpoints, such as journals; without what is not committed."""
        paths = self._history.paths
        folders = [paths.journal_dir, paths.locks_dir]
        return sum(bytes_on_disk(folder(run)) for run in lines for folder in folders)
