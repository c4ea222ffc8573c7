"""A new file that grows at its end, written past the page cache where the file system allows that.

What is written beside a training and seldom read would take the page cache's memory, which a virtual machine may even
have to get from its host first: of a redo log that costs more processor time than packing it. Direct writes want whole
pages, at addresses that begin on one. So bytes are gathered in memory of the file's own; but many that lie in their
memory as they will in their pages of the file are written from where they are.
"""

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Final

import numpy as np

__all__ = ["DirectFile", "place_for"]

_PIECE_BYTES: Final = (8 << 20) + (64 << 10)
"""Bytes gather until there are about so many, and go to the disk together: eight blocks of a MiB, and what is left of
those before."""


def place_for(position: int, memory: memoryview) -> int:
    """Return the first place in `memory` whose bytes `DirectFile.write` need not copy where the file has `position`
    bytes; it is less than a page behind the beginning."""
    return (position - _address(memory)) % mmap.PAGESIZE


class DirectFile:
    """One open file that takes bytes until `close`, or `abandon`. It must not exist before.

    Nothing is written but by its methods: a forked child that lets go of its copy writes nothing. Errors are those of
    the system calls, OSError.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            # Direct writes want memory that begins on a page.
            self._piece = mmap.mmap(-1, _PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._filled = 0
            self._is_direct = False
            self._go_direct()
        except BaseException:
            os.close(self._descriptor)
            path.unlink(missing_ok=True)
            raise

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; some may reach the file only with a later call. None is read after this."""
        rest = self._write_in_place(memoryview(data))
        while rest:
            part = rest[: _PIECE_BYTES - self._filled]
            self._piece[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == _PIECE_BYTES:
                self._write_piece()

    def _write_in_place(self, data: memoryview) -> memoryview:
        """Write whole pages of many bytes from where they are, if direct writes take them there; return the rest."""
        if not self._is_direct or len(data) < _PIECE_BYTES or place_for(self._filled, data):
            return data
        head = -self._filled % mmap.PAGESIZE
        self._piece[self._filled : self._filled + head] = data[:head]
        self._filled += head
        self._write_piece()
        end = len(data) - (len(data) - head) % mmap.PAGESIZE
        self._write_out(data[head:end])
        return data[end:]

    def room(self) -> memoryview:
        """Return memory whose bytes `extend` appends to the file: all but a page of what gathers. It holds until the
        next call of another method."""
        if self._filled:
            self._write_pages()
        return memoryview(self._piece)[self._filled :]

    def extend(self, nbytes: int) -> None:
        """Append so many bytes, the first that were written to `room`."""
        self._filled += nbytes

    def close(self) -> None:
        """Write what is left. The file has all bytes then, and is not synced."""
        try:
            # The end of a file is no multiple of what direct writes ask for.
            self._go_through_cache()
            self._write_piece()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of the file, which may lack bytes. Doing so twice does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._piece.close()
            os.close(descriptor)

    def _write_pages(self) -> None:
        """Write the whole pages of what has gathered; what is left of it then begins the memory."""
        whole = self._filled - self._filled % mmap.PAGESIZE
        rest = self._piece[whole : self._filled]
        self._filled = whole
        self._write_piece()
        self._piece[: len(rest)] = rest
        self._filled = len(rest)

    def _write_piece(self) -> None:
        # Released, so that an error, whose traceback has these, does not keep the memory from being closed.
        with memoryview(self._piece) as piece, piece[: self._filled] as filled:
            self._write_out(filled)
        self._filled = 0

    def _write_out(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.write(self._descriptor, data[done:])
            except OSError as error:
                # The disk's blocks are larger than a page, or a write has ended inside one.
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._go_through_cache()

    def _go_direct(self) -> None:
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_DIRECT)
            self._is_direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def _go_through_cache(self) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)
        self._is_direct = False


def _address(data: memoryview) -> int:
    return np.frombuffer(data, np.uint8).ctypes.data if data else 0
