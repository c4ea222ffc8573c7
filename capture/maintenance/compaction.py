"""Compaction beside a training: the checkpoints of a run that are not the newest are packed in a process of its own.

A process, since a thread would take turns with the training's own Python; it has the lowest priority, and packs the
parts of all ranks. The thread here, on the first rank, tells it what to pack, and lets the data files go. Both that and
the removal of checkpoints by a policy hold the lock `removing`: what an image was packed against is there when the data
file goes, and is needed from then on.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import catalog
from capture.background_thread import BackgroundThread
from capture.maintenance.retention import Retention
from catalog.access.pins import is_pinned
from catalog.compaction.pack import BeingReadError, drop_data_files, drop_images
from catalog.disk.durable import final_name, is_full
from catalog.errors import HistoryError, NotFoundError, SetupError
from catalog.format.marker import read_marker
from catalog.paths import is_packed_name
from catalog.records import CheckpointRef
from catalog.retention.facts import bytes_on_disk, is_image
from catalog.run_writer import RunWriter

__all__ = ["Compaction", "refuse_without_python"]

_NEWEST = 2
"""So many of the newest checkpoints stay as they are: they are what is restored, compared and analysed."""

_KEY_EVERY = 10

_LOOK_S = 1.0
"""The time between two looks whether another rank has committed a step, or a reader has let one go."""

_FULL_PAUSE_S = 60.0
"""The time after which a disk that was full is tried again: a quota can't be asked for its room."""

_END_PATIENCE_S = 5.0

_START = """
import sys
sys.path.insert(0, sys.argv[1])
from catalog.compaction import beside
beside.take_lowest_priority()
beside.main(*sys.argv[2:])
"""

_log = logging.getLogger(__name__)


def refuse_without_python() -> None:
    """Raise SetupError where no second process can be started: this one does not run from a Python's file."""
    if not sys.executable or getattr(sys, "frozen", False):
        raise SetupError(
            f"compact=True: sys.executable is {sys.executable!r}, which is no Python that could run a second process: "
            "leave it out, and run `dshistory compact` when the training has ended"
        )


class _FullError(Exception):
    """The disk has no room for an image, or its quota has not."""


class Compaction:
    """Packs the cold checkpoints of a run, oldest first, from the first `published` to `close`. Thread-safe.

    removing: the lock of whoever removes checkpoints of the run
    wait_idle: called with a number of seconds; returns once no snapshot is being written, or the time is over
    retention: asked for room in the budget of its policy before a checkpoint is packed

    Nothing here raises into the training. What can't be packed stays as it is, which is an event of the journal.
    """

    def __init__(
        self,
        run: RunWriter,
        *,
        removing: threading.Lock,
        wait_idle: Callable[[float], object],
        retention: Retention | None = None,
    ) -> None:
        self._run = run
        self._removing = removing
        self._wait_idle = wait_idle
        self._retention = retention
        self._changed = threading.Condition()
        self._published: list[int] = []
        self._committed: list[int] = []
        self._tried: set[int] = set()
        self._closing = False
        self._waits_for_room = False
        self._full_until = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._thread: BackgroundThread | None = None
        self.figures = (0, 0)
        """How many checkpoints were packed, and by how many bytes they take less."""

    def published(self, step: int) -> None:
        """Take note of a step whose part of this rank is published; its checkpoint may not be committed yet."""
        with self._changed:
            self._published.append(step)
            self._changed.notify_all()
        if self._thread is None and not self._closing:
            try:
                self._thread = BackgroundThread(self._work, name="dshistory-compaction")
            except Exception as error:  # noqa: BLE001 - as in `_work`: the snapshot that was published is safe
                self._closing = True
                self._failed(error)

    def close(self) -> None:
        """End at once: what is not packed yet stays as it is, for the next compaction."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._process is not None:
                self._process.kill()
        if self._thread is not None:
            self._thread.wait()

    def _work(self) -> None:
        try:
            while (step := self._next()) is not None:
                try:
                    self._wait_idle(_LOOK_S)
                    self._compact(CheckpointRef(self._run.run, step))
                finally:
                    self._let_go_of_room()
        except Exception as error:  # noqa: BLE001 - the checkpoints are safe; what ails their compaction ends that alone
            self._failed(error)
        finally:
            self._end_process()

    def _failed(self, error: Exception) -> None:
        # Nothing of the disk: rows gather in memory until the journal is flushed.
        self._run.journal.event("compaction_failed", None, reason=str(error))
        # The log's handlers are the user's: what they raise is no failure of the snapshot that was just published.
        with suppress(Exception):
            _log.warning("run %s: its checkpoints are not compacted any more: %s", self._run.run, error)

    def _next(self) -> int | None:
        """Return the oldest checkpoint that is cold and that nobody reads, once there is one; None at the end."""
        with self._changed:
            while not self._closing:
                step = None
                # Whatever ails the disk for a moment, the next look may do without.
                with suppress(OSError):
                    step = self._cold()
                if step is not None:
                    self._committed.remove(step)
                    return step
                waits_for_others = self._published or len(self._committed) > _NEWEST
                self._changed.wait(_LOOK_S if waits_for_others else None)
            return None

    def _cold(self) -> int | None:
        paths, run = self._run.paths, self._run.run
        committed = [step for step in self._published if paths.marker(run, step).exists()]
        self._published = [
            step for step in self._published if step not in committed and paths.step_dir(run, step).is_dir()
        ]
        self._committed += committed
        if time.monotonic() < self._full_until:
            return None
        for step in self._committed[:-_NEWEST]:
            try:
                if not self._is_pinned(step) and self._has_room(step):
                    return step
            except NotFoundError:
                # It was removed.
                self._committed.remove(step)
        return None

    def _is_pinned(self, step: int) -> bool:
        with self._removing:
            try:
                return is_pinned(self._run.paths, CheckpointRef(self._run.run, step))
            except OSError:
                # Nobody can tell now, so the next look does.
                return True

    def _has_room(self, step: int) -> bool:
        """Return whether the disk, and the budget, have room for the image of a checkpoint beside the checkpoint that
        the training captures next; then that of the budget is held."""
        room = os.statvfs(self._run.paths.root)
        needed = self._raw_bytes(step) + max(map(self._raw_bytes, (step, self._committed[-1])))
        free = room.f_bavail * room.f_frsize
        if free < needed:
            self._wait_for_room(step, f"{free} bytes are free, an image and the next checkpoint may take {needed}")
            return False
        problem = ""
        if self._retention is not None:
            with self._removing:
                problem = self._retention.hold_image(step)
        if problem:
            self._wait_for_room(step, problem)
        return not problem

    def _wait_for_room(self, step: int, reason: str) -> None:
        """Say once that there is no room, until a checkpoint was packed again."""
        if not self._waits_for_room:
            self._run.journal.event("compaction_waits", step, reason=f"{self._run.paths.root}: {reason}")
        self._waits_for_room = True

    def _raw_bytes(self, step: int) -> int:
        try:
            marker = read_marker(self._run.paths, self._run.run, step)
            return sum((self._run.paths.root / part.data).stat().st_size for part in marker.parts)
        except (HistoryError, OSError):
            # What ails it is told when it is packed.
            return 0

    def _compact(self, ref: CheckpointRef) -> None:
        paths = self._run.paths
        files: list[str] = []
        try:
            files = [part.data for part in read_marker(paths, ref.run, ref.step).parts]
            answer = self._asked({"pack": ref.step})
            for step, reason in answer["damaged"]:
                self._run.journal.event("compaction_left", step, reason=reason)
            if "left" in answer:
                raise (_FullError if answer["full"] else HistoryError)(answer["left"])
            self._drop(ref, files)
        except Exception as error:
            self._tidy(ref, files)
            if isinstance(error, _FullError) or is_full(error):
                self._full_until = time.monotonic() + _FULL_PAUSE_S
                self._wait_for_room(ref.step, str(error))
                self._left(ref, str(error), tried=False)
                return
            if not isinstance(error, (HistoryError, OSError)):
                raise
            self._left(ref, str(error), tried=not isinstance(error, BeingReadError))
            return
        self._waits_for_room = False
        self._tell({"dropped": ref.step})
        checkpoints, saved_bytes = self.figures
        self.figures = (checkpoints + 1, saved_bytes + answer["raw_bytes"] - answer["packed_bytes"])

    def _drop(self, ref: CheckpointRef, files: list[str]) -> None:
        """Let the data files of a packed checkpoint go, and tell the budget what it takes less."""
        folder = self._run.paths.step_dir(ref.run, ref.step)
        with self._removing:
            before = bytes_on_disk(folder, but=is_image)
            drop_data_files(self._run.paths, ref, files)
            if self._retention is not None:
                self._retention.image_ended(saved_bytes=before - bytes_on_disk(folder))

    def _let_go_of_room(self) -> None:
        if self._retention is not None:
            with self._removing:
                self._retention.image_ended()

    def _left(self, ref: CheckpointRef, reason: str, *, tried: bool) -> None:
        """Try a checkpoint once more: what it was packed against may have been removed meanwhile. Where a reader came,
        or the disk was full, it was not `tried`."""
        if self._closing or not self._run.paths.step_dir(ref.run, ref.step).is_dir():
            return
        if tried and ref.step in self._tried:
            self._run.journal.event("compaction_left", ref.step, reason=reason)
            return
        if tried:
            self._tried.add(ref.step)
        with self._changed:
            self._committed.insert(0, ref.step)

    def _tidy(self, ref: CheckpointRef, files: list[str]) -> None:
        """Remove what there is of images beside the data files that stay."""
        folder = self._run.paths.step_dir(ref.run, ref.step)
        if self._closing:
            self._end_process()
        with suppress(OSError), self._removing:
            for name in os.listdir(folder):
                if is_packed_name(final_name(name) or ""):
                    (folder / name).unlink(missing_ok=True)
            drop_images(self._run.paths, ref, files)

    def _asked(self, request: dict[str, int]) -> dict[str, Any]:
        """Return the answer to a request. HistoryError when the process has ended, which it does not by itself."""
        process = self._tell(request)
        assert process.stdout is not None
        answer = process.stdout.readline()
        if not answer:
            status = process.wait()
            if self._closing:
                raise HistoryError("the session has ended")
            raise RuntimeError(f"the process that compacts has ended with status {status}: {self._last_line()}")
        found: dict[str, Any] = json.loads(answer)
        if found["step"] != request["pack"]:
            raise RuntimeError(f"the process that compacts was asked for {request}, and answered {found}")
        return found

    def _last_line(self) -> str:
        assert self._said is not None
        self._said.seek(0)
        return self._said.read().decode(errors="replace").strip().rpartition("\n")[2]

    def _tell(self, request: dict[str, int]) -> "subprocess.Popen[bytes]":
        process = self._started()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            # At once, so that nothing of a request is left in a buffer.
            os.write(process.stdin.fileno(), json.dumps(request).encode() + b"\n")
        return process

    def _started(self) -> "subprocess.Popen[bytes]":
        with self._changed:
            if self._process is None:
                code = str(Path(catalog.__file__).parent.parent)
                arguments = [code, str(self._run.paths.root), self._run.run, str(_KEY_EVERY)]
                # A pipe that nobody empties would hold a process that says much.
                self._said = self._said or tempfile.TemporaryFile()  # noqa: SIM115 - `_end_process` closes it
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _START, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._said,
                    # Ctrl-C is for the training, which ends this process in its own time.
                    process_group=0,
                )
                if self._closing:
                    self._process.kill()
            return self._process

    def _end_process(self) -> None:
        with self._changed:
            process = self._process
        if process is None:
            return
        process.kill()
        # A disk that does not answer may hold it; it only ever adds files that nobody needs.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_PATIENCE_S)
        if self._said is not None:
            self._said.close()
