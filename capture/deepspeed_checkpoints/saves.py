"""The background thread that finishes saves, and moves `latest` to a save that is whole on every rank.

The protocol. Invariant: `latest` never names a tag of which some rank's files are not durable.
  1. Each rank publishes its files under the names that DeepSpeed asked for, each whole and durable.
  2. When all of a rank's files of a save are published, the rank publishes its receipt in the tag's folder: the save's
     id.
  3. A rank that has published its receipt looks for those of all ranks. If all carry this id, it publishes `latest`.
The rank that finishes last sees all receipts, so `latest` moves exactly when the last file of the last rank is durable;
when two ranks finish together both may publish it, with the same content.

No rank waits for another and nothing here is a collective: a dead or failing rank leaves no receipt, and `latest`
stays. A rank handles its saves in order and looks for receipts before its next save, so `latest` never goes back.
"""

import contextlib
import json
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from capture.background_thread import BackgroundThread
from capture.deepspeed_checkpoints.file import FileWrite
from catalog.disk.durable import publish_bytes, sync_dir
from catalog.errors import SnapshotError

__all__ = ["Save", "Saves"]


@dataclass(eq=False, slots=True)
class Save:
    """One call of save_checkpoint on this rank.

    `id` is the same on all ranks and is never used again: a receipt left under the same tag by an earlier save, or by
    an earlier process, has another id and does not count.
    """

    id: str
    folder: Path
    tag: str
    moves_latest: bool
    failure: Exception | None = None

    @property
    def tag_folder(self) -> Path:
        """The folder of the tag, which holds the files of all ranks."""
        return self.folder / self.tag

    def receipt(self, rank: int) -> Path:
        """Return the path of the file by which `rank` states that its files are durable."""
        return self.tag_folder / f".dshistory-{rank:05d}.json"


@dataclass(slots=True)
class _Work:
    """A file of `save` to finish, or, when `write` is None, the mark that all its files come before."""

    save: Save
    write: FileWrite | None = None


class Saves:
    """Finishes files in the order in which they were begun, then their save. Methods are for the training thread."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._changed = threading.Condition()
        self._work: deque[_Work] = deque()
        self._failures: list[SnapshotError] = []
        self._closing = False
        self._thread = BackgroundThread(self._run, name="dshistory-saves")

    def add(self, save: Save, write: FileWrite) -> None:
        """Queue `write`, a file of `save`, to be finished."""
        self._put(_Work(save, write))

    def complete(self, save: Save) -> None:
        """State that all files of `save` have been added. Without this call the save leaves no receipt."""
        self._put(_Work(save))

    def fail(self, save: Save, error: Exception) -> None:
        """Record that a file of `save` could not even be begun."""
        with self._changed:
            self._record_failure(save, error)

    def wait(self) -> None:
        """Return once the queue is empty and nothing is being finished."""
        with self._changed:
            self._changed.wait_for(lambda: not self._work)

    def take_failures(self) -> list[SnapshotError]:
        """Return the failures since the last call, one for each save that failed."""
        with self._changed:
            failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Finish everything and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.wait()

    def _put(self, work: _Work) -> None:
        with self._changed:
            self._work.append(work)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._closing)
                if not self._work:
                    return
                # Removed only when it is done: `wait` takes an empty queue to mean that nothing is on its way.
                work = self._work[0]
            try:
                self._handle(work)
            except Exception as error:  # noqa: BLE001 - one failed save must not end the thread that others wait for
                with self._changed:
                    self._record_failure(work.save, error)
            with self._changed:
                self._work.popleft()
                self._changed.notify_all()

    def _handle(self, work: _Work) -> None:
        if work.write is None:
            self._publish_receipt(work.save)
            return
        try:
            work.write.finish()
        except BaseException:
            # If removing the file fails too, it stays under a temporary name, which no reader looks at.
            with contextlib.suppress(OSError):
                work.write.abort()
            raise

    def _publish_receipt(self, save: Save) -> None:
        if save.failure is not None or not save.moves_latest:
            return
        # A rank that has no file of its own in this save still owes its receipt, and may be the first to need the
        # folder.
        save.tag_folder.mkdir(parents=True, exist_ok=True)
        # DeepSpeed made the folders and does not sync them. Without their entries on disk the durable files inside
        # could be lost in a crash, so they come before the receipt.
        for folder in (save.folder, save.folder.parent):
            sync_dir(folder)
        publish_bytes(json.dumps({"save": save.id}).encode(), save.receipt(self._rank))
        # After the receipt, never before: if two ranks looked first, both could miss each other and neither move
        # `latest`.
        if all(self._has_receipt(save, rank) for rank in range(self._world_size)):
            publish_bytes(save.tag.encode(), save.folder / "latest")

    def _has_receipt(self, save: Save, rank: int) -> bool:
        try:
            receipt = json.loads(save.receipt(rank).read_text())
        except (FileNotFoundError, ValueError):
            return False
        return isinstance(receipt, dict) and receipt.get("save") == save.id

    def _record_failure(self, save: Save, error: Exception) -> None:
        # Only the first error of a save is reported; the others mostly follow from it.
        if save.failure is None:
            save.failure = error
            failure = SnapshotError(
                f"the checkpoint {save.tag_folder} is not whole on rank {self._rank}, and {save.folder / 'latest'} was "
                f"not moved to it: {error}"
            )
            failure.__cause__ = error
            self._failures.append(failure)
