"""A process that looks at a folder over and over, and tells the most bytes that its files have taken at one moment."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Watched", "watched"]

_BLOCK_BYTES = 512
_PAUSE_S = 0.001


@dataclass
class Watched:
    """What the watcher has seen, once the body of `watched` has ended: bytes as the file system counts them."""

    most_bytes: int = 0
    looks: int = 0


@contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    """Watch a folder, which may not be there yet, until the end of the body."""
    seen = Watched()
    command = [sys.executable, "-S", __file__, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield seen
        finally:
            process.stdin.close()
            seen.most_bytes, seen.looks = map(int, process.stdout.readline().split())


def _files(folder: str) -> dict[int, int]:
    """Return the bytes of each file below a folder, by its inode: one that gets another name stays the same file."""
    found = {}
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    found.update(_files(entry.path))
                else:
                    facts = entry.stat(follow_symlinks=False)
                    found[facts.st_ino] = facts.st_blocks * _BLOCK_BYTES
    return found


def _watch(folder: str) -> None:
    print("watching", flush=True)
    most = looks = 0
    before = _files(folder)
    while not _has_ended():
        now = _files(folder)
        # What both looks have found was there between them: files only grow.
        most = max(most, sum(min(nbytes, now[key]) for key, nbytes in before.items() if key in now))
        looks, before = looks + 1, now
    print(most, looks, flush=True)


def _has_ended() -> bool:
    return bool(select.select([0], [], [], _PAUSE_S)[0])


if __name__ == "__main__":
    _watch(sys.argv[1])
