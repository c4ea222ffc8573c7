"""The background thread of a session: finishes snapshots in order, commits, registers, and writes the journal.

It never touches the content of the training's tensors, and takes part in no collective. Failures are kept for the
session to report.
"""

import collections
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from capture.background_thread import BackgroundThread
from capture.changes.fingerprints import Fingerprint
from capture.devices.marks import CUDA_MARKS, Mark, Marks, behind
from capture.loops.batch_digest import BatchDigest
from capture.maintenance.compaction import Compaction
from capture.maintenance.retention import Retention
from capture.publishing.fingerprint_log import FingerprintLog
from capture.publishing.huge_pages import HugePages
from capture.publishing.registration import Registration
from capture.publishing.stall_notice import StallNotice
from capture.publishing.statistics_thread import StatisticsThread
from capture.publishing.uncommitted_parts import UncommittedParts
from capture.snapshot.snapshot import Snapshot
from capture.unwritten.dedup import Deduplicator
from catalog.access.pins import pin
from catalog.disk.locks import free_lock
from catalog.errors import NotFoundError, SnapshotError
from catalog.records import CheckpointRef
from catalog.retention.policy import Policy
from catalog.run_writer import RunWriter

__all__ = ["Committer"]

FLUSH_INTERVAL_S = 60.0
"""Metrics between two commits are in the journal after so long; at a commit they are written with it."""
_UPKEEP_SHARE = 0.05
"""Where nothing needs the room, removals take at most this share of a core, so that short steps do not wait for them:
what a policy does not keep goes a little later, and before `close` has returned."""

_Metrics = tuple[int, Mapping[str, float | torch.Tensor], Sequence[Mark]]


class Committer:
    """Owns the writing end of a run, from its construction until `close`."""

    def __init__(
        self,
        run: RunWriter,
        *,
        stats_every: int,
        keep: Policy | None = None,
        compact: bool = False,
        marks: Marks = CUDA_MARKS,
    ) -> None:
        self._run = run
        self._marks = marks
        self._statistics = StatisticsThread(
            run, every=stats_every, wait_idle=lambda seconds: self.wait_below(1, timeout_s=seconds)
        )
        self._changed = threading.Condition()
        self._snapshots: collections.deque[Snapshot] = collections.deque()
        self._metrics: collections.deque[_Metrics] = collections.deque()
        self._batches: collections.deque[tuple[int, BatchDigest]] = collections.deque()
        self._failures: list[SnapshotError] = []
        self._figures: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._last_published: int | None = None
        self._failed_steps: set[int] = set()
        self._unflushed_failure = False
        self._uncommitted = UncommittedParts(run)
        self.retention = None if keep is None else Retention(keep, run, compacts=compact)
        self._removing = threading.Lock()
        self._compaction = None
        if compact and run.rank == 0:
            self._compaction = Compaction(
                run,
                removing=self._removing,
                wait_idle=lambda seconds: self.wait_below(1, timeout_s=seconds),
                retention=self.retention,
            )
        self._upkeeps_asked = self._upkeeps_done = 0
        self._is_behind = False
        self._keep_up_at = 0.0
        self._pins: list[int] = []
        self.deduplicator = Deduplicator(
            lambda step: run.paths.marker(run.run, step).exists(), pin=lambda step: keep is None or self._pin(step)
        )
        self._fingerprints = FingerprintLog(run)
        self._closing = False
        self._flushed = time.monotonic()
        self._registration = Registration(run, begin=self._begin)
        self._huge_pages = HugePages()
        self._work = 0
        self._under_way: tuple[int, str] | None = None
        self._stall_notice = StallNotice(lambda: self._under_way)
        self._thread = BackgroundThread(self._finish_snapshots, name="dshistory-committer")

    def submit(self, snapshot: Snapshot) -> None:
        """Finish `snapshot` once its data is written and its objects are final."""
        with self._changed:
            self._snapshots.append(snapshot)
            self._changed.notify_all()

    def metrics(self, step: int, values: Mapping[str, float | torch.Tensor]) -> None:
        """Write metrics to the journal; scalars of a device are read in the background, once it has computed them. For
        the thread that has handed them over. While a CUDA graph is captured they have no value, and are left out.
        """
        marks = self._marks
        if marks.is_recording():
            values = {
                name: value
                for name, value in values.items()
                if not (isinstance(value, torch.Tensor) and marks.owns(value))
            }
        computed = behind(values.values(), marks)
        with self._changed:
            self._metrics.append((step, values, computed))

    def batch(self, step: int, batch: BatchDigest) -> None:
        """Write the digest of what a step was trained on to the journal, once the devices have computed it."""
        with self._changed:
            self._batches.append((step, batch))

    def fingerprint(self, fingerprint: Fingerprint) -> None:
        """Write the fingerprint of a step, with others."""
        if self._fingerprints.add(fingerprint):
            with self._changed:
                self._changed.notify_all()

    def failed(self, step: int, error: Exception) -> None:
        """Record the failure of a snapshot in the journal and the index, and for `take_failures`. Other ranks then
        remove their parts of the step, so it must not be begun again.
        """
        with self._changed:
            self._failed_steps.add(step)
        if self.retention is not None:
            self.retention.ended(step)
        unremoved = ""
        try:
            self._run.discard(step, reason=str(error))
        except OSError as unreachable:
            unremoved = f"; its temporary files could not be removed: {unreachable}"
        self._report(f"the snapshot of step {step} of run {self._run.run} failed: {error}{unremoved}", error)
        with self._changed:
            self._unflushed_failure = True
            self._changed.notify_all()

    def has_failed(self, step: int) -> bool:
        """Return whether a snapshot of `step` has failed on this rank."""
        with self._changed:
            return step in self._failed_steps

    def take_failures(self) -> list[SnapshotError]:
        """Return the failures since the last call."""
        with self._changed:
            failures, self._failures = self._failures, []
        return failures

    def figures(self) -> Mapping[str, float]:
        """Return the sums of the figures of all finished snapshots: their number as `snapshots`, bytes and seconds."""
        with self._changed:
            return self._figures.copy()

    def without_statistics(self) -> int:
        """Return how many finished snapshots that are to have statistics have none yet."""
        return self._statistics.left()

    def compacted(self) -> tuple[int, int]:
        """Return how many checkpoints were compacted on this rank, and by how many bytes they take less."""
        return (0, 0) if self._compaction is None else self._compaction.figures

    def last_published(self) -> int | None:
        """Return the newest step whose part of this rank is published; None before the first."""
        with self._changed:
            return self._last_published

    def is_pending(self, step: int) -> bool:
        """Return whether a snapshot of `step` that was not dropped is not finished yet."""
        with self._changed:
            return any(one.step == step and not one.is_dropped for one in self._snapshots)

    def pending(self) -> int:
        """Return the number of snapshots that are not finished yet."""
        with self._changed:
            return len(self._snapshots)

    def wait_below(self, count: int, *, timeout_s: float | None = None) -> bool:
        """Wait until fewer than `count` snapshots are pending; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._snapshots) < count, timeout_s)

    def make_room(self) -> None:
        """Wait until every snapshot is finished, and what the session's policy does not keep is removed."""
        with self._changed:
            self._upkeeps_asked += 1
            asked = self._upkeeps_asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._snapshots and self._upkeeps_done >= asked)

    def give_up(self) -> None:
        """Let every pending snapshot end as a failure, as soon as the writes that are under way have ended."""
        with self._changed:
            pending = list(self._snapshots)
        for snapshot in pending:
            snapshot.give_up()
        self._statistics.give_up()

    def close(self) -> None:
        """Finish everything, flush, and end the thread. The objects of every snapshot must be final."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.wait()
        self._stall_notice.end()
        while self._pins:
            free_lock(self._pins.pop())
        if self._statistics.close():
            self._registration.register()

    def _finish_snapshots(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._snapshots
                        or self._closing
                        or self._unflushed_failure
                        or self._upkeeps_asked > self._upkeeps_done
                        or self._fingerprints.is_full
                    ),
                    self._until_due_s(),
                )
                failure, self._unflushed_failure = self._unflushed_failure, False
                snapshot = self._snapshots[0] if self._snapshots else None
                closing = self._closing
                asked = self._upkeeps_asked > self._upkeeps_done
            if snapshot is not None:
                committed = self._publish(snapshot)
                with self._changed:
                    self._snapshots.popleft()
                    self._changed.notify_all()
                # It holds nothing of the training, but must not stay until the next one comes.
                snapshot = None
                if committed:
                    self._registration.committed()
                # After the snapshot has left the queue: `wait` need not wait for the index, which loses nothing.
                self._registration.register_when_due()
                self._fingerprints.write_now_and_then()
                self._is_behind = self.retention is not None
                self._keep_up_when_due()
            elif closing:
                if self._compaction is not None:
                    self._compaction.close()
                self._registration.register_when_due(at_once=True)
                self._begin("the last entry in the journal")
                self._remove_uncommitted(self._uncommitted.closing)
                self._fingerprints.close()
                self._keep_up()
                self._flush(force=True)
                return
            else:
                self._registration.register_when_due()
                if asked:
                    self._keep_up()
                else:
                    self._keep_up_when_due()
            # The other ranks read in the journal that this one has failed a step.
            self._flush(force=failure)
            self._move_when_due()
            self._under_way = None

    def _begin(self, what: str) -> None:
        self._work += 1
        self._under_way = (self._work, f"{what} of run {self._run.run} in {self._run.paths.root}")

    def _publish(self, snapshot: Snapshot) -> bool:
        """Finish a snapshot, or report why not; return whether its checkpoint is committed now."""
        try:
            while not snapshot.finalized.wait(self._until_flush_s()):
                self._flush()
            if snapshot.is_dropped:
                return False
            self._begin(f"the writing of step {snapshot.step}")
            snapshot.compose(self._run)
            while not snapshot.written(self._until_flush_s()):
                self._flush()
            # `finish` flushes the journal before it publishes: who sees a checkpoint sees its metrics too.
            self._record_steps()
            published = snapshot.finish(self._run)
            self._flushed = time.monotonic()
            committed = self._run.try_commit(snapshot.step)
            self.deduplicator.published(published)
            self._statistics.published(snapshot.step)
            if self._compaction is not None:
                self._compaction.published(snapshot.step)
            self._remove_uncommitted(lambda: self._uncommitted.published(snapshot.step))
        except Exception as error:  # noqa: BLE001 - whatever fails this snapshot must not end the thread others wait for
            snapshot.abort()
            self.failed(snapshot.step, error)
            self._flush(force=True)
            return False
        with self._changed:
            for name, value in {"snapshots": 1, **published.figures}.items():
                self._figures[name] += value
            self._last_published = snapshot.step
        self._or_stay_in_small_pages(
            lambda: self._huge_pages.written_from(snapshot.plan.in_place(published.checksums), forks=snapshot.forks)
        )
        return committed

    def _move_when_due(self) -> None:
        if self._huge_pages.due_s() <= 0:
            self._begin("the moving of memory into huge pages")
            self._or_stay_in_small_pages(self._huge_pages.move_when_due)

    def _or_stay_in_small_pages(self, work: Callable[[], None]) -> None:
        """Do what concerns huge pages; when it fails, nothing more is moved, for small pages hold the same bytes."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever fails must not end the thread others wait for
            self._huge_pages.stop()
            self._run.journal.event("huge_pages_failed", None, reason=str(error))

    def _remove_uncommitted(self, remove: Callable[[], None]) -> None:
        try:
            remove()
        except OSError as error:
            # They stay for the garbage collection of the next run.
            self._run.journal.event("removal_failed", None, reason=str(error))

    def _until_due_s(self) -> float:
        waits = [self._until_flush_s(), self._registration.due_s(), self._huge_pages.due_s()]
        if self._is_behind:
            waits.append(self._keep_up_at - time.monotonic())
        return max(0.0, min(waits))

    def _keep_up_when_due(self) -> None:
        """Remove what the policy does not keep, unless the removals have had their share of the time already."""
        has_time = time.monotonic() >= self._keep_up_at
        if self._is_behind and self.retention is not None and (has_time or not self.retention.can_wait):
            self._keep_up()

    def _keep_up(self) -> None:
        """Remove what the session's policy does not keep."""
        if self.retention is None:
            return
        self._is_behind = False
        with self._changed:
            asked = self._upkeeps_asked
        began = time.thread_time()
        self._begin("the removal of checkpoints")
        try:
            with self._removing:
                problem = self.retention.upkeep()
            if problem:
                self._run.journal.event("upkeep_incomplete", None, reason=problem)
        except Exception as error:  # noqa: BLE001 - what can't be removed must not end the thread others wait for
            self._report(f"checkpoints of run {self._run.run} could not be removed: {error}", error)
            self._run.journal.event("upkeep_failed", None, reason=str(error))
        self._keep_up_at = time.monotonic() + (time.thread_time() - began) / _UPKEEP_SHARE
        with self._changed:
            self._upkeeps_done = asked
            self._changed.notify_all()

    def _pin(self, step: int) -> bool:
        try:
            held = pin(self._run.paths, CheckpointRef(self._run.run, step))
        except NotFoundError:
            return False
        if held is not None:
            self._pins.append(held)
        return held is not None

    def _until_flush_s(self) -> float:
        return max(0.0, self._flushed + FLUSH_INTERVAL_S - time.monotonic())

    def _flush(self, *, force: bool = False) -> None:
        """Write metrics, events and tags to the journal, when `force` is true or it is time."""
        if self._fingerprints.is_full:
            self._fingerprints.write()
        if not force and self._until_flush_s() > 0:
            return
        self._fingerprints.write_now_and_then()
        self._record_steps()
        try:
            self._run.journal.flush()
        except Exception as error:  # noqa: BLE001 - whatever fails must not end the thread others wait for
            self._report(f"the journal of run {self._run.run} could not be written: {error}", error)
        self._flushed = time.monotonic()

    def _record_steps(self) -> None:
        """Give the journal the metrics and batches of the steps since the last call."""
        with self._changed:
            rows, batches = list(self._metrics), list(self._batches)
            self._metrics.clear()
            self._batches.clear()
        for step, values, computed in rows:
            for name, value in values.items():
                try:
                    for mark in computed:
                        mark.wait()
                    self._run.journal.metric(step, name, float(value))
                except Exception as error:  # noqa: BLE001 - one bad figure must not end the thread others wait for
                    self._report(f"metric {name!r} of step {step} of run {self._run.run} is lost: {error}", error)
        for step, batch in batches:
            try:
                self._run.journal.event("batch", step, hash=batch.hex(), reader=batch.reader)
            except Exception as error:  # noqa: BLE001 - nor does a device that has failed
                self._report(f"the digest of the batch of step {step} of run {self._run.run} is lost: {error}", error)

    def _report(self, message: str, error: Exception) -> None:
        failure = SnapshotError(message)
        failure.__cause__ = error
        with self._changed:
            self._failures.append(failure)
