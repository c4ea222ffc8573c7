"""The room that a byte budget leaves for the redo log of one rank.

The first rank grants room at each step that is due, when all ranks are in the training thread together: a log tells
what it takes, may take no more meanwhile, and goes on when it has been given its share. So nothing is asked of other
ranks, or of the disk, while steps are written.
"""

import threading

__all__ = ["RedoRoom"]


class RedoRoom:
    """Keeps what the redo log of one rank counts for, and may count for. Thread-safe.

    A log holds, before it writes, what the segment that is being written takes at most; what is published counts for
    what it takes. Bytes are those of `catalog.retention.redo_segments.segment_bytes`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._published_bytes = 0
        self._held_bytes = 0
        self._limit_bytes = 0
        self._missed_bytes = 0
        self._is_asked = False
        self._is_out = False

    def tell(self) -> tuple[int, int]:
        """Return what all segments count for that were ever written, and what was not written since the last call for
        want of room. Until `grant`, nothing more is held."""
        with self._changed:
            self._is_asked = True
            missed, self._missed_bytes = self._missed_bytes, 0
            return self._published_bytes + self._held_bytes, missed

    def grant(self, nbytes: int) -> None:
        """Let the log take so many bytes more than it does now."""
        with self._changed:
            self._limit_bytes = self._published_bytes + self._held_bytes + nbytes
            self._is_asked = self._is_out = False
            self._changed.notify_all()

    @property
    def is_out(self) -> bool:
        """True after something had no room, until the next `grant`: what comes behind it could not be made use of."""
        with self._changed:
            return self._is_out

    def hold(self, nbytes: int) -> bool:
        """Return whether the segment that is being written may come to take so many bytes, and then hold them; also to
        hold fewer than before."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_asked or nbytes <= self._held_bytes)
            if nbytes > self._held_bytes and (self._is_out or self._published_bytes + nbytes > self._limit_bytes):
                self._is_out = True
                return False
            self._held_bytes = nbytes
            return True

    def missed(self, nbytes: int) -> None:
        """Note that a step was left out that would have taken so many bytes at most."""
        with self._changed:
            self._missed_bytes += nbytes

    def published(self, nbytes: int) -> None:
        """Note that the segment that was held is published, and takes so many bytes; 0 where it is not there."""
        with self._changed:
            self._published_bytes += nbytes
            self._held_bytes = 0
