"""One step on its way to the disk: started on the training thread, released at the barrier, finished behind it."""

import errno
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import native
from capture.changes.change_detector import ChangeDetector, Check, Comparison
from capture.changes.kept_items import Held
from capture.data_file.data_file import (
    PlacedObject,
    Trailer,
    data_file_header,
    make_trailer,
    manifest_rows,
    object_entries,
)
from capture.data_file.late_bytes import ObjectTensors
from capture.data_file.parts import entry_key
from capture.data_file.plan import Plan
from capture.devices.feed import Copies, NoCopies
from capture.snapshot.forks import fork_count
from capture.snapshot.state_listing import StateListing
from capture.snapshot.transient_state import TransientState
from capture.state.objects import inlined
from capture.unwritten.dedup import Deduplicator, Published, Samples, UnchangedCheck
from capture.unwritten.derived_check import DerivedCheck, Place
from capture.unwritten.rounding_expectation import RoundingExpectation
from catalog.errors import SnapshotError
from catalog.format.fingerprints import seed_of
from catalog.records import CHECKSUM_BYTES, Extent
from catalog.run_writer import RunWriter

__all__ = ["Snapshot"]

_LEAST_PAUSE_S = 0.05
_PAUSE_PER_LOOK = 20
"""Looking for changes while the data is written takes at most a twentieth of one core."""


@dataclass(eq=False)
class Snapshot:
    """A pending snapshot. It holds every storage that the writer may still read, until it is finished or aborted, and
    no longer.

    `finalized` is set when the objects have their final values: only then the ends of the file can be made.
    `read_at_step`: the objects that were read right after the update, by the provider's id. `is_dropped`: the step has
    changed, so that nothing of this is to be published. `forks`: how often the process had forked before it began.
    """

    step: int
    plan: Plan
    data_tmp: Path
    job: native.WriteJob
    copies: Copies
    unchanged: UnchangedCheck
    derived: DerivedCheck
    detector: ChangeDetector
    objects: Sequence[PlacedObject]
    begin_tensors: Callable[..., ObjectTensors]
    held: Held | None
    samples: Samples
    read_at_step: Mapping[int, Sequence[PlacedObject]]
    rounding: RoundingExpectation
    is_dropped: bool = False
    forks: int = field(default_factory=fork_count)
    object_tensors: ObjectTensors | None = None
    finalized: threading.Event = field(default_factory=threading.Event)
    _judging: threading.Lock = field(default_factory=threading.Lock)
    _judged: threading.Event = field(default_factory=threading.Event)
    _verdict: Comparison = field(default_factory=lambda: Comparison([]))
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
        deduplicator: Deduplicator,
        kept: TransientState | None = None,
    ) -> "Snapshot":
        """Begin to write the state as it is now, except for what was `kept` of it, and for parts that `deduplicator`
        expects to be unchanged since an earlier checkpoint. OSError when the file can't be made, UnsupportedError by
        name.
        """
        listing.require_running()
        objects = listing.read_objects(kept)
        stored = deduplicator.stored
        plan = listing.plan(objects, kept=kept, stored=stored)
        expected_otherwise = listing.rounding.look(plan.paired)
        if deduplicator.expect_unchanged(plan) or expected_otherwise:
            # The committer may learn more meanwhile: the plan and the check go by the same expectation.
            stored = deduplicator.stored
            plan = listing.plan(objects, kept=kept, stored=stored)
        data_tmp = run.begin(step)
        data_tmp.unlink(missing_ok=True)
        held = Held(plan.watched.items)
        # Before the first byte is read: a write from now on is found.
        detector = ChangeDetector(plan.watched, check=check, seed=seed_of(step), held=held)
        samples = deduplicator.sample_new(plan)
        taken = listing.take(plan, writer)
        job = writer.start(plan.write, str(data_tmp))
        copies = NoCopies() if taken is None else taken.feed(job)
        unchanged = UnchangedCheck(
            plan.expected_unchanged, stored, job, root=run.paths.root, align=plan.align, copies=plan.copies
        )
        derived = DerivedCheck(plan.derivable, job, align=plan.align, copies=plan.copies, after=unchanged.wait)
        appended = partial(_wait_for, unchanged, derived)
        begin_tensors = partial(listing.begin_tensors, job=job, align=plan.align, after=appended)
        snapshot = cls(
            step,
            plan,
            data_tmp,
            job,
            copies,
            unchanged,
            derived,
            detector,
            objects.placed,
            begin_tensors,
            held,
            samples,
            objects.read_at_step,
            listing.rounding,
        )
        threading.Thread(target=snapshot._look_for_changes, name="dshistory-changes", daemon=True).start()
        return snapshot

    def written(self, timeout_s: float) -> bool:
        """Return whether all data is written; False on timeout. OSError when writing failed, SnapshotError when the
        copies from a device did.
        """
        try:
            return self.job.wait(timeout_s)
        except OSError as error:
            if self._failure is not None:
                raise self._failure from error
            if errno.EFAULT in (error.errno, getattr(self.copies.failure, "errno", None)):
                # The writer knows only an address; the plan knows whose memory it was.
                self._require_unchanged()
            if self.copies.failure is None:
                raise
            raise SnapshotError(
                f"the tensors of step {self.step} that are fed to the writer can't be copied: {self.copies.failure}"
            ) from self.copies.failure

    def abort(self) -> None:
        """Stop, and remove the file; no copy is left. Idempotent."""
        with self._judging:
            # Nobody is looking at the tensors now, nor will be.
            self._judged.set()
        self.derived.stop()
        self.job.abort()
        self.copies.wait()
        _wait_for(self.unchanged, self.derived)
        if self.object_tensors is not None:
            self.object_tensors.wait()
        self._let_go()

    def drop(self) -> None:
        """Abort the snapshot before its objects are final, which is no failure. No byte is read when this returns."""
        self.is_dropped = True
        self.abort()
        self.finalized.set()

    def release(self) -> None:
        """The barrier: return once no live byte is needed any more. Idempotent, from any thread. Memory that was
        written to since the step fails the snapshot in the background.
        """
        self.copies.wait()
        self.job.release()
        _wait_for(self.unchanged, self.derived)
        if self.object_tensors is not None:
            self.object_tensors.wait()
        self._judge(self.detector.compare, finally_=True)

    def finalize_objects(self, latest: Sequence[PlacedObject], *, at_once: bool = False) -> None:
        """Replace objects by their `latest` values, begin to read their tensors, and let the file be finished. With
        `at_once` the tensors are all read when this returns, else when the barrier does.
        """
        by_name = {placed.encoded.name: placed for placed in latest}
        self.objects = [by_name.get(placed.encoded.name, placed) for placed in self.objects]
        self.object_tensors = self.begin_tensors(self.objects)
        if at_once:
            self.object_tensors.wait()
        self.finalized.set()

    def fail(self, error: Exception) -> None:
        """Let the snapshot be finished as a failure, instead of finalizing its objects."""
        self._failure = error
        self.finalized.set()

    def give_up(self) -> None:
        """Fail the snapshot because nobody will wait for it. Does nothing to a finished one."""
        self.fail(SnapshotError(f"step {self.step} was given up, because its session was left before it was written"))
        self.job.abort()

    def compose(self, run: RunWriter) -> None:
        """Make the ends of the file, once the objects are finalized; the data may still be moving."""
        if self._failure is not None:
            raise self._failure
        if not self.plan.has_room_for(object_entries(self.objects)):
            # The objects have grown between the step, when the header's length was fixed, and the next forward.
            self.objects = [PlacedObject(inlined(placed.encoded), placed.placement) for placed in self.objects]
        self._require_late_bytes()
        appended = [*self.unchanged.placed, *self.derived.placed, *self._tensors().placed]
        trailer = make_trailer(self.objects, self.plan, file=self._file(run), appended=appended)
        header = data_file_header(self.plan, trailer, run=run.run, step=self.step, rank=run.rank)
        self._ends = header, trailer

    def finish(self, run: RunWriter) -> Published:
        """Write the ends of the file and publish this rank's part. `compose` comes first; the data must be written."""
        assert self._ends is not None, "compose comes first"
        header, trailer = self._ends
        checksums = self.job.checksums()
        self._require_unchanged()
        file = self._file(run)
        references = [*self.unchanged.references, *self._derived(file, checksums)]
        nbytes = self.job.finish(header=header, trailer=trailer.data)
        rows = manifest_rows(self.plan, trailer, checksums, header, file=file, references=references)
        run.publish_part(self.step, data_tmp=self.data_tmp, extents=rows)
        self.rounding.learn(equal=self.derived.equal, differing=self.derived.differing)
        figures = {"file_bytes": nbytes, **self._not_written(), **self.job.stats}
        self._let_go()
        return Published(
            self.step,
            file,
            self.plan.referable,
            checksums,
            self.unchanged.mispredicted,
            figures,
            self._samples(run),
            self.unchanged.digests,
        )

    def _samples(self, run: RunWriter) -> Mapping[str, bytes]:
        """Return the samples of new parts; none where a device fails to give them. The part is published by now, and
        what was not sampled is referred to a checkpoint later.
        """
        try:
            return self.samples()
        except Exception as error:  # noqa: BLE001 - a device may raise anything, and the checkpoint has all its bytes
            run.journal.event("sampling_failed", self.step, reason=str(error))
            return {}

    def _not_written(self) -> dict[str, float]:
        return {"unchanged_bytes": self.unchanged.unchanged_bytes, "derived_bytes": self.derived.derived_bytes}

    def _derived(self, file: str, checksums: bytes) -> list[Extent]:
        """Return the rows of the weights that are not stored; `checksums`: those of the plan's parts."""
        return self.derived.references(self._places(file, checksums)) if self.plan.derivable else []

    def _places(self, file: str, checksums: bytes) -> dict[str, Place]:
        """Return where the bytes of every part are that has some: in this file, or in an earlier one."""
        size = CHECKSUM_BYTES
        places = {
            key: (file, offset, checksums[size * i : size * (i + 1)])
            for i, (key, offset) in enumerate(self.plan.offsets_by_key.items())
        }
        places |= {placed.piece.key: (file, placed.offset, placed.checksum) for placed in self.unchanged.placed}
        return places | {
            entry_key(one.kind, one.name, one.shape, one.start, one.numel): (one.file, one.offset, one.checksum)
            for one in self.unchanged.references
        }

    def _let_go(self) -> None:
        """Hold no memory of the training any more; the barrier may still hold this snapshot."""
        self.held, self.objects, self.read_at_step = None, (), {}
        self.detector.let_go()
        self.derived.let_go()
        if self.object_tensors is not None:
            self.object_tensors.let_go()

    def _file(self, run: RunWriter) -> str:
        return run.paths.relative(run.paths.data(run.run, self.step, run.rank))

    def _tensors(self) -> ObjectTensors:
        assert self.object_tensors is not None, "finalize_objects comes first"
        return self.object_tensors

    def _require_late_bytes(self) -> None:
        try:
            self.unchanged.require()
            self.derived.require()
            self._tensors().require()
        except OSError as error:
            if error.errno == errno.EFAULT:
                # The writer knows only an address; the objects and the plan know whose memory it was.
                self._require_unchanged()
            raise

    def _look_for_changes(self) -> None:
        # An edit that is undone before the barrier, such as an average of the weights swapped in for an evaluation,
        # leaves nothing behind for a comparison there; but the writer may have read it.
        pause_s = _LEAST_PAUSE_S
        while not self._judged.wait(pause_s):
            began = time.monotonic()
            read = self.job.released() and self.copies.is_done and self.unchanged.is_done and self.derived.is_done
            finally_ = read and not self.plan.watched.on_device
            self._judge(partial(self.detector.compare_beside, all_bytes=finally_), finally_=finally_)
            pause_s = max(_LEAST_PAUSE_S, _PAUSE_PER_LOOK * (time.monotonic() - began))

    def _judge(self, compare: Callable[[], Comparison], *, finally_: bool) -> Comparison:
        # The verdict is made once, by whichever comes first. If the background is first, all data has been read and the
        # barrier has not been reached, so a tensor that is now as it was at the step was so all the time, but for edits
        # that were undone between two looks. If the barrier is first, the training thread has decided there: afterwards
        # the next update may write.
        with self._judging:
            if not self._judged.is_set():
                self._verdict = compare()
                # At the barrier the training does not wait for a device: what it gives to it later comes later.
                if finally_ or self._verdict.is_bad:
                    self._judged.set()
            return self._verdict

    def _require_unchanged(self) -> None:
        verdict = self._judge(self.detector.compare_beside, finally_=True)
        changed = [*verdict.changed(), *self._tensors().changed]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise SnapshotError(
                f"{', '.join(changed[:3])}{more}: written to, or freed, after step {self.step} while it was being "
                "read; wrap such edits in `with session.modify():`"
            )


def _wait_for(unchanged: UnchangedCheck, derived: DerivedCheck) -> None:
    """Return once both have read the last live byte, and have appended what they append."""
    unchanged.wait()
    derived.wait()
