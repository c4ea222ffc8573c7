"""One step on its way to the disk: started on the training thread, released at the barrier, finished in the background."""

import errno
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import native
from capture.snapshot.change_detector import ChangeDetector, Check
from capture.snapshot.data_file import (
    PlacedObject,
    Trailer,
    data_file_header,
    make_trailer,
    manifest_rows,
    object_entries,
)
from capture.snapshot.dedup import Published, StoredAt, UnchangedCheck
from capture.snapshot.device_feed import Copies, NoCopies
from capture.snapshot.plan import Plan
from capture.snapshot.state_listing import StateListing
from capture.snapshot.transient_state import TransientState
from capture.state.objects import inlined
from catalog.errors import SnapshotError
from catalog.run_writer import RunWriter

__all__ = ["Snapshot"]


@dataclass(eq=False)
class Snapshot:
    """A pending snapshot. It holds the plan, and with it every storage that the writer may still read, until it is
    finished.
    """

    step: int
    plan: Plan
    data_tmp: Path
    job: native.WriteJob
    copies: Copies
    guess: UnchangedCheck
    witness: ChangeDetector
    objects: list[PlacedObject] = field(default_factory=list)
    settled: threading.Event = field(default_factory=threading.Event)
    _judging: threading.Lock = field(default_factory=threading.Lock)
    _touched: list[str] | None = None
    _failure: Exception | None = None
    _ends: tuple[bytes, Trailer] | None = None

    @classmethod
    def start(
        cls,
        source: StateListing,
        writer: native.Writer,
        run: RunWriter,
        step: int,
        *,
        check: Check,
        resting: Mapping[str, StoredAt],
        moment: TransientState | None = None,
    ) -> "Snapshot":
        """Begin to write the state as it is now, but for what `moment` has kept of it; `resting` is expected to be unchanged.
        OSError when the file can't be made, UnsupportedError by name.
        """
        begin = partial(cls._begin, source, writer, run, step, check=check, resting=resting, moment=moment)
        snapshot = begin()
        try:
            # While the first bytes are moving.
            snapshot.objects = source.objects(moment)
            if source.fits(snapshot.plan):
                return snapshot
        except BaseException:
            snapshot.abort()
            raise
        snapshot.abort()
        grown = begin()
        grown.objects = snapshot.objects
        return grown

    @classmethod
    def _begin(
        cls,
        source: StateListing,
        writer: native.Writer,
        run: RunWriter,
        step: int,
        *,
        check: Check,
        resting: Mapping[str, StoredAt],
        moment: TransientState | None,
    ) -> "Snapshot":
        plan = source.plan(moment, resting=resting)
        data_tmp = run.begin(step)
        data_tmp.unlink(missing_ok=True)
        witness = ChangeDetector(plan.live_items, hashed=plan.live_parts if check == "hash" else ())
        taken = source.take(plan, writer)
        job = writer.start(plan.write, str(data_tmp))
        copies = NoCopies() if taken is None else taken.feed(job)
        return cls(step, plan, data_tmp, job, copies, UnchangedCheck(plan.resting, resting), witness)

    def written(self, timeout_s: float) -> bool:
        """Whether all data is written; False on timeout. OSError when writing failed, SnapshotError when the copies did."""
        try:
            return self.job.wait(timeout_s)
        except OSError as error:
            if error.errno == errno.EFAULT:
                # The writer knows an address; whose memory it was stands in the plan.
                self._require_intact()
            if self.copies.failure is None:
                raise
            raise SnapshotError(
                f"the device tensors of step {self.step} can't be copied: {self.copies.failure}"
            ) from self.copies.failure

    def abort(self) -> None:
        """Stop, and remove the file; no copy is left. Idempotent."""
        self.job.abort()
        self.copies.wait()
        self.guess.wait()

    def release(self) -> None:
        """The barrier: return once no live byte is needed any more. Memory that was touched since the step fails the
        snapshot in the background.
        """
        self.copies.wait()
        self.job.release()
        self.guess.wait()
        with self._judging:
            if self._touched is None:
                self._touched = self.witness.changed()

    def settle(self, moved: Sequence[PlacedObject]) -> None:
        """Take the final form of objects that moved after the step, and let the file be finished."""
        latest = {placed.encoded.name: placed for placed in moved}
        self.objects = [latest.get(placed.encoded.name, placed) for placed in self.objects]
        self.settled.set()

    def fail(self, error: Exception) -> None:
        """Let it be finished as a failure."""
        self._failure = error
        self.settled.set()

    def compose(self, run: RunWriter) -> None:
        """Make the file's ends, once it is settled; the data may still be moving."""
        if self._failure is not None:
            raise self._failure
        if not self.plan.has_room_for(object_entries(self.objects)):
            # Grown between the step and the next forward, when the header's length was fixed.
            self.objects = [PlacedObject(inlined(placed.encoded), placed.placement) for placed in self.objects]
        self._read_resting()
        tail = make_trailer(self.objects, self.plan, file=self._file(run), moved=self.guess.moved)
        header = data_file_header(self.plan, tail, run=run.run, step=self.step, rank=run.rank)
        self._ends = header, tail

    def finish(self, run: RunWriter) -> Published:
        """Write the file's ends and publish this rank's part; it must be composed, and the job's data written. Returns what
        is published.
        """
        assert self._ends is not None, "compose comes first"
        header, tail = self._ends
        checksums = self.job.checksums()
        self._require_intact()
        nbytes = self.job.finish(header=header, trailer=tail.data)
        file = self._file(run)
        rows = manifest_rows(self.plan, tail, checksums, header, file=file, references=self.guess.references)
        run.publish_part(self.step, data_tmp=self.data_tmp, extents=rows)
        figures = {"file_bytes": nbytes, "unchanged_bytes": self.guess.unchanged_bytes, **self.job.stats}
        moved = frozenset(part.key for part, _ in self.guess.moved)
        return Published(self.step, file, self.plan, checksums, moved, figures)

    def _file(self, run: RunWriter) -> str:
        return run.paths.relative(run.paths.data(run.run, self.step, run.rank))

    def _read_resting(self) -> None:
        try:
            self.guess.require()
        except OSError:
            self._require_intact()
            raise

    def _require_intact(self) -> None:
        # Before the barrier all has been read by now: what is as it was at the step was so all the time. At the barrier
        # the training thread has looked, and afterwards the next update may write.
        with self._judging:
            if self._touched is None:
                self._touched = self.witness.changed()
            touched = self._touched
        if touched:
            more = f" and {len(touched) - 3} more" if len(touched) > 3 else ""
            raise SnapshotError(
                f"{', '.join(touched[:3])}{more}: written to, or freed, after step {self.step} while it was being read; wrap "
                "such edits in `with session.modify():`"
            )
