"""One step on its way to the disk: started on the training thread, released at the barrier, finished behind it."""

import errno
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

    `finalized` is set when the objects have their final values: only then the ends of the file can be made.
    """

    step: int
    plan: Plan
    data_tmp: Path
    job: native.WriteJob
    copies: Copies
    unchanged: UnchangedCheck
    detector: ChangeDetector
    objects: Sequence[PlacedObject]
    finalized: threading.Event = field(default_factory=threading.Event)
    _judging: threading.Lock = field(default_factory=threading.Lock)
    _changed: list[str] | None = None
    _failure: Exception | None = None
    _ends: tuple[bytes, Trailer] | None = None

    @classmethod
    def start(
        cls,
        listing: StateListing,
        writer: native.Writer,
        run: RunWriter,
        step: int,
        *,
        check: Check,
        stored: Mapping[str, StoredAt],
        kept: TransientState | None = None,
    ) -> "Snapshot":
        """Begin to write the state as it is now, except for what was `kept` of it; parts that are `stored` in an
        earlier checkpoint are expected to be unchanged. OSError when the file can't be made, UnsupportedError by name.
        """
        objects = listing.read_objects(kept)
        plan = listing.plan(objects, kept=kept, stored=stored)
        data_tmp = run.begin(step)
        data_tmp.unlink(missing_ok=True)
        # Before the first byte is read: a write from now on is found.
        detector = ChangeDetector(plan.live_items, hashed=plan.live_parts if check == "hash" else ())
        taken = listing.take(plan, writer)
        job = writer.start(plan.write, str(data_tmp))
        copies = NoCopies() if taken is None else taken.feed(job)
        unchanged = UnchangedCheck(plan.expected_unchanged, stored)
        return cls(step, plan, data_tmp, job, copies, unchanged, detector, objects.placed)

    def written(self, timeout_s: float) -> bool:
        """Return whether all data is written; False on timeout. OSError when writing failed, SnapshotError when the
        copies from a device did.
        """
        try:
            return self.job.wait(timeout_s)
        except OSError as error:
            if error.errno == errno.EFAULT:
                # The writer knows only an address; the plan knows whose memory it was.
                self._require_unchanged()
            if self.copies.failure is None:
                raise
            raise SnapshotError(
                f"the device tensors of step {self.step} can't be copied: {self.copies.failure}"
            ) from self.copies.failure

    def abort(self) -> None:
        """Stop, and remove the file; no copy is left. Idempotent."""
        self.job.abort()
        self.copies.wait()
        self.unchanged.wait()

    def release(self) -> None:
        """The barrier: return once no live byte is needed any more. Idempotent, from any thread. Memory that was
        written to since the step fails the snapshot in the background.
        """
        self.copies.wait()
        self.job.release()
        self.unchanged.wait()
        with self._judging:
            if self._changed is None:
                self._changed = self.detector.changed()

    def finalize_objects(self, latest: Sequence[PlacedObject]) -> None:
        """Replace objects by their `latest` values, and let the file be finished."""
        by_name = {placed.encoded.name: placed for placed in latest}
        self.objects = [by_name.get(placed.encoded.name, placed) for placed in self.objects]
        self.finalized.set()

    def fail(self, error: Exception) -> None:
        """Let the snapshot be finished as a failure, instead of finalizing its objects."""
        self._failure = error
        self.finalized.set()

    def compose(self, run: RunWriter) -> None:
        """Make the ends of the file, once the objects are finalized; the data may still be moving."""
        if self._failure is not None:
            raise self._failure
        if not self.plan.has_room_for(object_entries(self.objects)):
            # The objects have grown between the step, when the header's length was fixed, and the next forward.
            self.objects = [PlacedObject(inlined(placed.encoded), placed.placement) for placed in self.objects]
        self._read_unchanged()
        trailer = make_trailer(self.objects, self.plan, file=self._file(run), mispredicted=self.unchanged.mispredicted)
        header = data_file_header(self.plan, trailer, run=run.run, step=self.step, rank=run.rank)
        self._ends = header, trailer

    def finish(self, run: RunWriter) -> Published:
        """Write the ends of the file and publish this rank's part. `compose` comes first; the data must be written."""
        assert self._ends is not None, "compose comes first"
        header, trailer = self._ends
        checksums = self.job.checksums()
        self._require_unchanged()
        nbytes = self.job.finish(header=header, trailer=trailer.data)
        file = self._file(run)
        rows = manifest_rows(self.plan, trailer, checksums, header, file=file, references=self.unchanged.references)
        run.publish_part(self.step, data_tmp=self.data_tmp, extents=rows)
        figures = {"file_bytes": nbytes, "unchanged_bytes": self.unchanged.unchanged_bytes, **self.job.stats}
        mispredicted = frozenset(part.key for part, _ in self.unchanged.mispredicted)
        return Published(self.step, file, self.plan, checksums, mispredicted, figures)

    def _file(self, run: RunWriter) -> str:
        return run.paths.relative(run.paths.data(run.run, self.step, run.rank))

    def _read_unchanged(self) -> None:
        try:
            self.unchanged.require()
        except OSError:
            self._require_unchanged()
            raise

    def _require_unchanged(self) -> None:
        # The verdict is made once, by whichever of two comes first. If the background thread is first, all data has
        # been read and the barrier has not been reached, so a tensor that is now as it was at the step was so all the
        # time. If the barrier is first, the training thread has decided there: afterwards the next update may write.
        with self._judging:
            if self._changed is None:
                self._changed = self.detector.changed()
            changed = self._changed
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise SnapshotError(
                f"{', '.join(changed[:3])}{more}: written to, or freed, after step {self.step} while it was being "
                "read; wrap such edits in `with session.modify():`"
            )
