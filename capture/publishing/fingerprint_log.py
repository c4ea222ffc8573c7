"""The fingerprints of a session on their way to the disk: gathered in memory, and written now and then.

Nothing depends on them: what can't be written is left out, which the journal says, and fails no snapshot.
"""

import collections
import threading
import time

from capture.changes.fingerprints import Fingerprint
from catalog.errors import FormatError
from catalog.format.fingerprints import FingerprintWriter, TensorTable
from catalog.run_writer import RunWriter

__all__ = ["FingerprintLog"]

_WRITTEN_AT_BYTES = 4 << 20
"""So many bytes of digests are written at once, however little time has passed."""
_MOST_BYTES = 24 << 20
"""So many bytes of digests wait in memory for a disk that is slow or full; further steps are left out."""
_LEAST_PAUSE_S = 10.0


class FingerprintLog:
    """Takes fingerprints from the training thread; a background thread writes them."""

    def __init__(self, run: RunWriter) -> None:
        self._run = run
        self._writer = FingerprintWriter(run.paths, run=run.run, rank=run.rank)
        self._lock = threading.Lock()
        self._waiting: collections.deque[Fingerprint] = collections.deque()
        self._nbytes = 0
        self._unwritten_bytes = 0
        self._left_out: list[int] = []
        self._written = time.monotonic()

    def add(self, fingerprint: Fingerprint) -> bool:
        """Take the fingerprint of a step; return whether so much has gathered that it is to be written now."""
        with self._lock:
            if self._nbytes + self._unwritten_bytes + fingerprint.nbytes > _MOST_BYTES:
                self._left_out.append(fingerprint.step)
                return False
            self._waiting.append(fingerprint)
            self._nbytes += fingerprint.nbytes
            return self.is_full

    @property
    def is_full(self) -> bool:
        """True when so much has gathered that it is to be written now."""
        return self._nbytes >= _WRITTEN_AT_BYTES

    def write_now_and_then(self) -> None:
        """Write what has gathered, unless that was done a moment ago: a training may commit at every step."""
        if self.is_full or time.monotonic() - self._written >= _LEAST_PAUSE_S:
            self.write()

    def write(self) -> None:
        """Write what has gathered. When that fails, it is tried again the next time, and the journal says why."""
        with self._lock:
            waiting, self._waiting = self._waiting, collections.deque()
            nbytes, self._nbytes = self._nbytes, 0
            self._unwritten_bytes += nbytes
            left_out, self._left_out = self._left_out, []
        self._written = time.monotonic()
        if left_out:
            reason = f"the disk was too slow for {len(left_out)} steps, {left_out[0]} to {left_out[-1]}"
            self._run.journal.event("fingerprints_left_out", left_out[0], reason=reason)
        try:
            self._writer.publish([row for one in waiting for row in self._rows(one)])
        except OSError as error:
            self._run.journal.event("fingerprints_failed", None, reason=str(error))
            return
        with self._lock:
            self._unwritten_bytes = 0

    def close(self) -> None:
        """Write the rest, and merge what was written into few files."""
        self.write()
        self._writer.close()

    def _rows(self, fingerprint: Fingerprint) -> list[tuple[int, TensorTable, bytes]]:
        try:
            # Before the writer, which may have to try again: a description that is too large never fits.
            fingerprint.table.id  # noqa: B018
            return [(fingerprint.step, fingerprint.table, fingerprint.digests())]
        except (RuntimeError, FormatError) as error:
            self._run.journal.event("fingerprints_left_out", fingerprint.step, reason=str(error))
            return []
