"""Records the calls with which programs change the files of a folder, in the order in which they happened.

`recorder.c` is preloaded into the programs. A recording is complete when `crash_states` rebuilds from it alone exactly
the folder that the programs have left.
"""

import ctypes
import enum
import itertools
import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from preloaded import recorder

__all__ = ["Call", "Op", "calls_in", "kill_before", "note", "recorded_calls", "recording_environment"]

_RECORD = struct.Struct("<IIQqIIQ")


class Op(enum.IntEnum):
    """What a call does; the numbers are those of `recorder.c`."""

    CREATE = 1
    MKDIR = 2
    WRITE = 3
    RESIZE = 4
    RENAME = 5
    LINK = 6
    UNLINK = 7
    RMDIR = 8
    SYNC = 9
    NOTE = 10


@dataclass(frozen=True, slots=True)
class Call:
    """One call. Paths are absolute; `at` is the offset of a write, or the new size of a file that is resized. The
    `path` of a note is its text."""

    op: Op
    process: int
    inode: int
    at: int
    path: str
    other: str
    data: bytes

    def __str__(self) -> str:
        size = f" {self.at}+{len(self.data)}" if self.op == Op.WRITE else f" {self.at}" if self.op == Op.RESIZE else ""
        return f"{self.op.name.lower()} {self.path}{' ' + self.other if self.other else ''}{size}"


def recording_environment(*, root: Path, log: Path | None) -> dict[str, str]:
    """Return the environment of a program whose calls below `root` are recorded in `log`, or only counted."""
    environment = {**os.environ, "LD_PRELOAD": str(recorder()), "DSHISTORY_RECORD_ROOT": str(root)}
    return environment if log is None else {**environment, "DSHISTORY_RECORD_LOG": str(log)}


def recorded_calls(
    commands: Sequence[Sequence[str]], *, root: Path, log: Path, environments: Sequence[Mapping[str, str]]
) -> list[Call]:
    """Run the programs at the same time, each with its additions to the environment, and return their calls below
    `root`. CalledProcessError when one of them fails."""
    shared = recording_environment(root=root, log=log)
    programs = [
        subprocess.Popen(command, env={**shared, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, own in zip(commands, environments, strict=True)
    ]
    for program in programs:
        said, _ = program.communicate(timeout=300)
        if program.returncode:
            print(said)
            raise subprocess.CalledProcessError(program.returncode, program.args)
    return calls_in(log)


def calls_in(log: Path, *, cut: bool = False) -> list[Call]:
    """Return the calls in a log; with `cut`, its last record may be cut off, because its process was killed."""
    data = log.read_bytes()
    calls, at = [], 0
    while at + (_RECORD.size if cut else 1) <= len(data):
        op, process, inode, place, path_bytes, other_bytes, data_bytes = _RECORD.unpack_from(data, at)
        ends = [at := at + _RECORD.size]
        for nbytes in (path_bytes, other_bytes, data_bytes):
            ends.append(at := at + nbytes)
        if cut and at > len(data):
            break
        path, other, content = (data[begin:end] for begin, end in itertools.pairwise(ends))
        calls.append(Call(Op(op), process, inode, place, os.fsdecode(path), os.fsdecode(other), content))
    return calls


def note(text: str) -> None:
    """Put a note between the calls of this process, which runs under the recorder."""
    ctypes.CDLL(None).recorder_note(text.encode())


def kill_before(call: int) -> None:
    """Kill this process, which runs under the recorder, right before its `call`-th call from now on; 0: never."""
    ctypes.CDLL(None).recorder_kill_before(ctypes.c_long(call))
