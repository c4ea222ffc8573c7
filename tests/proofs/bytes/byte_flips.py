"""Flips bytes of a history one at a time and asks `verify` for them.

Only what a file belongs to is verified: a checkpoint for the files of its folder, and for the files of a run a history
that holds this run alone, without its steps. A file of a checkpoint is read by no other part of the verification. Most
bytes are those of data files. There one flip in `WHOLE_EVERY` is looked for by `verify`, and the others by the two
functions with which it reads a data file, so that the same manifest is not parsed for each byte.
"""

import functools
import itertools
import os
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from catalog_helpers import Piece, Run
from small_training import train

from catalog.compaction.compact import compact_run
from catalog.data_files.check_data import check_data_file, check_header
from catalog.errors import HistoryError
from catalog.format.manifest import Manifest
from catalog.history import History
from catalog.paths import parse_step_dir
from catalog.read.checkpoint import read_checkpoint
from catalog.records import CheckpointRef
from catalog.verify import verify

__all__ = ["Flips", "published", "small_history"]


PACKED_RUN = "packed"
WHOLE_EVERY = 64


def small_history(root: Path) -> Path:
    """Make a history that has every kind of file: a captured training with a redo log, a run of two ranks, and a run
    with a packed key frame and a checkpoint that is packed against it.
    """
    train(root, width=2, steps=1)
    with Run(root, "two-ranks", world_size=2) as run:
        halves = [Piece("w", b"ab", shape=(4,), start=start, placement="partitioned") for start in (0, 2)]
        run.checkpoint(0, [halves[0]], [halves[1]], loss=1.0)
    with Run(root, PACKED_RUN) as run:
        for step in (0, 10):
            numbers = struct.pack("<64f", *(1 + i + step / 1000 for i in range(64)))
            run.checkpoint(step, [Piece("w", numbers, dtype="F32"), Piece("rng", b'{"a":1}', "object")])
    packed = compact_run(History.open(root), PACKED_RUN, (0, 10), key_every=2)
    assert [one.base for one in packed.steps] == [None, 0]
    # `verify` also asks the index what is gone, which takes longer than the rest and finds no flipped byte.
    for path in root.glob("catalog.*"):
        path.unlink()
    return root


def published(root: Path) -> list[Path]:
    """Return every file of a history but the index, which is derived, and the locks: one that was damaged does not say
    where it was taken, and then the age of the run decides whether it is dead.
    """
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")
    return sorted(path for path in files if not path.name.startswith("catalog."))


class Flips:
    """The flipped bytes of a history so far: how many were found, by kind of file, and which were missed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.counts: Counter[str] = Counter()
        self.missed: list[str] = []
        self._manifests: dict[Path, Manifest] = {}
        self._times_ns = itertools.count(1)

    def every_byte(self, path: Path, *, every: int = 1, first: int = 0) -> None:
        """Flip one bit of each byte of a file, or of one byte in `every`, beginning with `first`; and make the file one
        byte shorter and longer."""
        self.flip(path, range(first, path.stat().st_size, every))
        whole = path.read_bytes()
        for changed, what in ((whole[:-1], "one byte shorter"), (whole + b"\0", "one byte longer")):
            self._found(path, changed, whole, what)

    def flip(self, path: Path, offsets: Iterable[int]) -> None:
        """Flip one bit of each of these bytes, one at a time; which bit differs from byte to byte."""
        whole = path.read_bytes()
        for number, offset in enumerate(offsets):
            changed = bytearray(whole)
            changed[offset] ^= 1 << (offset * 5 + offset // 8) % 8
            self._found(path, changed, whole, f"byte {offset}", alone=number % WHOLE_EVERY != 0)

    def _found(self, path: Path, changed: bytes | bytearray, whole: bytes, what: str, *, alone: bool = False) -> None:
        is_data = path.suffix == ".safetensors"
        look = functools.partial(_named_alone, self._manifest(path)) if alone and is_data else _named
        try:
            self._write(path, changed)
            named = look(self.root, path)
        finally:
            self._write(path, whole)
        # What is damaged in an image is named as what its data file has.
        name = str(path.relative_to(self.root)).replace(".packed", ".safetensors")
        folder = path.parent.name
        of_run = ("journal", "statistics", "fingerprints", "redo", "audits")
        kind = folder if folder in of_run else path.name.partition(".")[2]
        kind = path.name if kind == "json" else kind
        if name in named:
            self.counts[kind] += 1
        else:
            self.missed.append(f"{name}: {what}: named are {sorted(named)}")

    def _write(self, path: Path, data: bytes | bytearray) -> None:
        path.write_bytes(data)
        # An image that has the size and the time of one that was read before is not read again: each has a time.
        at = next(self._times_ns)
        os.utime(path, ns=(at, at))

    def _manifest(self, path: Path) -> Manifest:
        """Return the manifest of a data file that is whole."""
        if path not in self._manifests:
            ref = _ref(self.root, path)
            assert ref is not None
            manifests = read_checkpoint(History(self.root, uuid="").paths, ref.run, ref.step).manifests
            (self._manifests[path],) = (one for one in manifests if self.root / one.file == path)
        return self._manifests[path]


def _ref(root: Path, path: Path) -> CheckpointRef | None:
    """Return the checkpoint to which a file belongs."""
    parts = path.relative_to(root).parts
    step = parse_step_dir(parts[3]) if len(parts) > 3 and parts[2] == "steps" else None
    return None if step is None else CheckpointRef(parts[1], step)


def _named_alone(manifest: Manifest, root: Path, path: Path) -> set[str]:
    """Return the files in which the functions that read a data file find damage."""
    named = {damaged.file for damaged in check_data_file(root, manifest, progress=lambda nbytes: None)}
    try:
        check_header(root, manifest)
    except HistoryError:
        named.add(manifest.file)
    return named


def _named(root: Path, path: Path) -> set[str]:
    """Return the files that `verify` names, of the checkpoint or the run to which a file belongs."""
    history = History(root, uuid="")
    ref = _ref(root, path)
    if ref is not None:
        return {problem.file for problem in verify(history, [ref])}
    own = path.relative_to(root).parts[1:2]
    runs = list((root / "runs").iterdir())
    # All else of the history: the other runs and the steps are aside.
    hidden = {run: run.with_name(f".{run.name}") for run in runs if own and run.name != own[0]}
    hidden |= {run / "steps": run / ".steps" for run in runs if run not in hidden}
    for shown, aside in hidden.items():
        shown.rename(aside)
    try:
        return {problem.file for problem in verify(history)}
    finally:
        for shown, aside in hidden.items():
            aside.rename(shown)
