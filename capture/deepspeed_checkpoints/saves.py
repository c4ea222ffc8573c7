"""Saves on their way to the disk, in a thread of its own; when a save is whole on every rank, `latest` names it.

The protocol. Invariant: `latest` never names a tag of which some rank's files are not durable.
  1. Each rank publishes its files under the names DeepSpeed asked for, each whole and durable.
  2. When all of a rank's files of the save are published, it publishes its receipt in the tag's folder: the save's number.
  3. Whoever then sees the receipts of all ranks with this number publishes `latest`. The last to finish does.
No rank waits for another and nothing here is a collective: of a dead or failing rank the receipt is missing, and `latest` stays.
A rank handles its saves in order and looks for receipts before its next one, so `latest` never goes back.
"""

import contextlib
import json
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from capture.deepspeed_checkpoints.file import StateWrite
from catalog.disk.durable import publish_bytes, sync_dir
from catalog.errors import SnapshotError

__all__ = ["Save", "Saves"]


@dataclass(eq=False, slots=True)
class Save:
    """One call of save_checkpoint on this rank. `number` is the same on all ranks and is never used again."""

    number: str
    folder: Path
    tag: str
    latest: bool
    failure: Exception | None = None

    @property
    def place(self) -> Path:
        """The tag's folder."""
        return self.folder / self.tag

    def receipt(self, rank: int) -> Path:
        """Where this rank says that its part is there."""
        return self.place / f".dshistory-{rank:05d}.json"


@dataclass(slots=True)
class _Work:
    """A file of a save to be finished, or, without one, the end of the save."""

    save: Save
    write: StateWrite | None = field(default=None)


class Saves:
    """Finishes files in the order in which they were begun, and settles saves. Its methods are for the training thread."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._changed = threading.Condition()
        self._work: deque[_Work] = deque()
        self._failures: list[SnapshotError] = []
        self._closing = False
        # A daemon: the interpreter joins other threads before it runs the exit handler that ends this one.
        self._thread = threading.Thread(target=self._run, name="dshistory-saves", daemon=True)
        self._thread.start()

    def add(self, save: Save, write: StateWrite) -> None:
        """Finish `write`, a file of `save`, when its turn comes."""
        self._put(_Work(save, write))

    def seal(self, save: Save) -> None:
        """`save` has all its files."""
        self._put(_Work(save))

    def fail(self, save: Save, error: Exception) -> None:
        """`save` lacks a file that could not even be begun."""
        with self._changed:
            self._note(save, error)

    def wait(self) -> None:
        """Return once nothing is on its way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._work)

    def take_failures(self) -> list[SnapshotError]:
        """The failures since the last call, one for each save."""
        with self._changed:
            failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Finish everything and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

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
                work = self._work[0]
            try:
                self._do(work)
            except Exception as error:  # noqa: BLE001 - whatever fails this save must not end the thread others wait for
                with self._changed:
                    self._note(work.save, error)
            with self._changed:
                self._work.popleft()
                self._changed.notify_all()

    def _do(self, work: _Work) -> None:
        if work.write is None:
            self._settle(work.save)
            return
        try:
            work.write.finish()
        except BaseException:
            # What can't be removed now is a temporary name that no reader looks at.
            with contextlib.suppress(OSError):
                work.write.abort()
            raise

    def _settle(self, save: Save) -> None:
        if save.failure is not None or not save.latest:
            return
        save.place.mkdir(parents=True, exist_ok=True)
        for folder in (save.folder, save.folder.parent):
            sync_dir(folder)
        publish_bytes(json.dumps({"save": save.number}).encode(), save.receipt(self._rank))
        if all(self._has(save, rank) for rank in range(self._world_size)):
            publish_bytes(save.tag.encode(), save.folder / "latest")

    def _has(self, save: Save, rank: int) -> bool:
        try:
            said = json.loads(save.receipt(rank).read_text())
        except (FileNotFoundError, ValueError):
            return False
        return isinstance(said, dict) and said.get("save") == save.number

    def _note(self, save: Save, error: Exception) -> None:
        if save.failure is None:
            save.failure = error
            failure = SnapshotError(
                f"the checkpoint {save.place} is not whole on rank {self._rank}, and {save.folder / 'latest'} was not moved to it: {error}"
            )
            failure.__cause__ = error
            self._failures.append(failure)
