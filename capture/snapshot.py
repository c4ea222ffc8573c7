"""One step on its way to the disk: started on the training thread, released at the barrier, finished in the background."""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import native
from capture.datafile import PlacedObject, data_file_extents, data_file_header, make_tail
from capture.intact import Check, Witness
from capture.moment import Moment
from capture.plan import Plan
from capture.source import Source
from capture.staging import Copies
from catalog.errors import SnapshotError
from catalog.run import RunWriter

__all__ = ["Snapshot"]


@dataclass(eq=False)
class Snapshot:
    """A pending snapshot. It holds the plan, and with it every storage that the writer may still read, until it is
    finished.
    """

    step: int
    plan: Plan
    objects: list[PlacedObject]
    data_tmp: Path
    engine: native.Engine
    copies: Copies
    witness: Witness
    settled: threading.Event = field(default_factory=threading.Event)
    _beginning: threading.Lock = field(default_factory=threading.Lock)
    _judging: threading.Lock = field(default_factory=threading.Lock)
    _touched: list[str] | None = None
    _job: native.WriteJob | None = None
    _failure: Exception | None = None

    @classmethod
    def start(
        cls,
        source: Source,
        engine: native.Engine,
        run: RunWriter,
        step: int,
        *,
        check: Check,
        moment: Moment | None = None,
    ) -> "Snapshot":
        """Begin to write the state as it is now, but for what `moment` has kept of it. OSError when the file can't be
        made, UnsupportedError by name.
        """
        objects = source.objects(moment)
        plan = source.plan(objects, moment)
        data_tmp = run.begin(step)
        data_tmp.unlink(missing_ok=True)
        witness = Witness(plan, check=check)
        snapshot = cls(step, plan, objects, data_tmp, engine, source.copy_mirrors(plan), witness)
        if not plan.device_mirrors:
            snapshot.job()
        return snapshot

    def job(self) -> native.WriteJob:
        """The file being written; begun here when the copies of device tensors had to arrive first. From any thread.
        OSError, for every caller, when the file can't be made.
        """
        self.copies.wait()
        with self._beginning:
            if self._job is None:
                if self._failure is not None:
                    raise self._failure
                try:
                    self._job = self.engine.start(self.plan.write, str(self.data_tmp))
                except OSError as error:
                    self._failure = error
                    raise
            return self._job

    def abort(self) -> None:
        """Stop, and remove the file. Idempotent."""
        if self._job is not None:
            self._job.abort()

    def release(self) -> None:
        """The barrier: return once no live byte is needed any more. A file that can't be made, or memory that was
        touched since the step, fails the snapshot in the background.
        """
        with contextlib.suppress(OSError):
            self.job().release()
        with self._judging:
            if self._touched is None:
                self._touched = self.witness.moved()

    def settle(self, moved: Sequence[PlacedObject]) -> None:
        """Take the final form of objects that moved after the step, and let the file be finished."""
        latest = {placed.encoded.name: placed for placed in moved}
        self.objects = [latest.get(placed.encoded.name, placed) for placed in self.objects]
        self.settled.set()

    def fail(self, error: Exception) -> None:
        """Let it be finished as a failure."""
        self._failure = error
        self.settled.set()

    def finish(self, run: RunWriter) -> dict[str, Any]:
        """Write the file's ends and publish this rank's part; the job's data must be written. Returns its figures."""
        if self._failure is not None:
            raise self._failure
        job = self.job()
        checksums = job.checksums()
        self._require_intact()
        file = run.paths.relative(run.paths.data(run.run, self.step, run.rank))
        tail = make_tail(self.objects, self.plan, file=file)
        header = data_file_header(self.plan, tail, run=run.run, step=self.step, rank=run.rank)
        nbytes = job.finish(header=header, tail=tail.data)
        extents = data_file_extents(self.plan, tail, checksums, header, file=file)
        run.publish_part(self.step, data_tmp=self.data_tmp, extents=extents)
        return {"file_bytes": nbytes, **job.stats}

    def _require_intact(self) -> None:
        # Before the barrier all has been read by now: what is as it was at the step was so all the time. At the barrier
        # the training thread has looked, and afterwards the next update may write.
        with self._judging:
            if self._touched is None:
                self._touched = self.witness.moved()
            touched = self._touched
        if touched:
            more = f" and {len(touched) - 3} more" if len(touched) > 3 else ""
            raise SnapshotError(
                f"{', '.join(touched[:3])}{more}: written to, or freed, after step {self.step} while it was being read; wrap "
                "such edits in `with session.modify():`"
            )
