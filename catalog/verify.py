"""Verification: reads every byte of a history and reports whatever contradicts its checksums or its format.

Every byte is covered by a checksum. JSON files, journal segments, statistics and audits carry their own, a marker has
the checksum of each manifest, a manifest that of each extent, and each byte of a data file belongs to one extent. The
index and the lock files are not checked: the index is derived, and it is rebuilt when it is damaged. But files that it
has registered and that are gone are problems.

Others may write, merge and remove meanwhile. What a folder has listed and who may do so has taken away is no problem.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow.compute as pc

from catalog.access.pins import pinned
from catalog.data_files.check_data import check_data_file, check_header
from catalog.disk.regular_file import check_folders, is_real_folder
from catalog.errors import HistoryError, NotFoundError
from catalog.format.audit_file import audited_step, read_audit
from catalog.format.fingerprints import read_fingerprints
from catalog.format.journal import read_segment
from catalog.format.json_facts import read_history_json
from catalog.format.manifest import Manifest
from catalog.format.marker import read_marker
from catalog.format.redo_reader import open_blocks, read_redo_segment
from catalog.format.redo_segment import redo_segments
from catalog.format.segments import Segment, current_segments, listings
from catalog.format.statistics_file import parse_name, read_statistics
from catalog.history import History
from catalog.paths import HistoryPaths, is_run_id
from catalog.read.checkpoint import Checkpoint, read_part
from catalog.read.runs import run_facts, steps
from catalog.read.tensors import logical_tensors
from catalog.records import CheckpointRef

__all__ = ["Problem", "verify"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong. `file` is relative to the history's root. `field` is "checksum of kind/name" for a
    damaged extent, otherwise the part of the file that is damaged."""

    file: str
    field: str
    message: str


def verify(
    history: History,
    refs: Sequence[CheckpointRef] | None = None,
    *,
    progress: Callable[[int], None] | None = None,
    share: tuple[int, int] = (0, 1),
) -> list[Problem]:
    """Return every problem of the history, or of `refs` alone; an empty list when there is none. Nothing is changed.

    A flipped bit in any byte of any published file is found and named. This takes as much memory as the largest extent,
    or 64 MiB if that is more. `progress` is called with the bytes of data files checked since its last call.
    Checkpoints that are not committed do not exist and are skipped. `share`, such as (2, 8), is for 8 processes that
    verify together: the third of them checks the bytes of its eighth of every data file, and everything else as the
    others do.
    """
    check = _Verification(history.paths, progress or (lambda nbytes: None), share)
    if refs is None:
        check.everything()
    else:
        check.attempt(history.paths.history_json, "content", lambda: read_history_json(history.paths))
        for run in sorted({ref.run for ref in refs}):
            check.attempt(history.paths.run_json(run), "content", partial(run_facts, history.paths, run))
        for ref in refs:
            check.checkpoint(ref)
    return sorted(check.problems)


class _Verification:
    """One pass over a history, which gathers problems instead of raising them."""

    def __init__(self, paths: HistoryPaths, progress: Callable[[int], None], share: tuple[int, int]) -> None:
        self.paths = paths
        self.progress = progress
        self.share = share
        self.problems: list[Problem] = []

    def everything(self) -> None:
        self.attempt(self.paths.history_json, "content", lambda: read_history_json(self.paths))
        self.attempt(self.paths.runs, "folder", partial(check_folders, self.paths.runs, root=self.paths.root))
        for folder in _entries(self.paths.runs):
            if not is_real_folder(folder):
                if folder.is_symlink():
                    self.link(folder)
            elif is_run_id(folder.name):
                self.run(folder.name)
            else:
                self.add(folder, "name", "no run can have this name")
        self.registered()

    def registered(self) -> None:
        """Add what only the index still knows."""
        # Imported here: `verify` of single checkpoints, before a restore, must not wait for DuckDB's import.
        from catalog.index.registered import gone

        known = {problem.file for problem in self.problems}
        for lost in gone(self.paths):
            if self.paths.relative(lost.path) not in known:
                self.add(lost.path, "file", lost.message)

    def run(self, run: str) -> None:
        refs = [CheckpointRef(run, step) for step in steps(self.paths, run)]
        path = self.paths.run_json(run)
        if path.exists() or refs:
            self.attempt(path, "content", lambda: run_facts(self.paths, run))
        for link in (path for path in _entries(self.paths.run_dir(run)) if path.is_symlink()):
            self.link(link)
        for link in (path for path in _entries(self.paths.steps_dir(run)) if path.is_symlink()):
            self.link(link)
        self.segments(self.paths.journal_dir(run), partial(read_segment, run=run))
        self.segments(self.paths.fingerprints_dir(run), lambda path: list(read_fingerprints(path, run=run)))
        for name in redo_segments(self.paths, run):
            self.listed(self.paths.redo_dir(run) / name.name, partial(_check_redo, run=run))
        for path in _entries(self.paths.statistics_dir(run)):
            if parse_name(path.name) is not None:
                self.listed(path, partial(read_statistics, run=run))
        for path in _entries(self.paths.audits_dir(run)):
            if audited_step(path.name) is not None:
                self.listed(path, partial(read_audit, run=run))
        for ref in refs:
            self.checkpoint(ref, may_go=True)

    def link(self, path: Path) -> None:
        self.add(path, "file", "is a symbolic link: a history has none inside, and nothing behind it is read")

    def segments(self, folder: Path, read: Callable[[Path], object]) -> None:
        """Check all segments in a folder, and that none is missing. While their writer merges them a listing may have
        neither those that it removes nor the one that replaces them: what the next one says too is so."""
        checked: set[str] = set()
        missing: list[tuple[str, str]] = []
        for names in listings(folder):
            there = [name for name in names if name in checked or self.listed(folder / name, read)]
            checked.update(there)
            before, missing = missing, _missing_segments(names)
            if there == names and missing == before:
                break
        else:
            self.add(folder, "content", "names files that are not there, each time that it is listed")
        for first, following in missing:
            self.add(folder / first, "file", f"missing, as are all segments up to {following}")

    def listed(self, path: Path, read: Callable[[Path], object]) -> bool:
        """Check a file that its folder has listed. Return whether it is still there."""
        try:
            read(path)
        except FileNotFoundError:
            return False
        except (HistoryError, OSError) as error:
            self.add(path, "content", str(error))
        return True

    def checkpoint(self, ref: CheckpointRef, *, may_go: bool = False) -> None:
        """Check the marker and the manifests, and then the data files whose manifest can be trusted. `may_go`: whether
        it is no problem that the checkpoint is gone."""
        with ExitStack() as pins:
            try:
                pins.enter_context(pinned(self.paths, ref))
            except NotFoundError:
                if may_go and not is_real_folder(self.paths.step_dir(ref.run, ref.step)):
                    return
            except (HistoryError, OSError):
                # The marker is no file that can be opened: the check of its content says more.
                pass
            self.pinned_checkpoint(ref)

    def pinned_checkpoint(self, ref: CheckpointRef) -> None:
        path = self.paths.marker(ref.run, ref.step)
        marker = self.attempt(path, "content", lambda: read_marker(self.paths, ref.run, ref.step))
        if marker is None:
            return
        manifests = []
        for part in marker.parts:
            manifest = self.attempt(
                self.paths.root / part.manifest, "content", partial(read_part, self.paths, marker, part)
            )
            if manifest is not None:
                self.data(manifest)
                manifests.append(manifest)
        if len(manifests) == len(marker.parts):
            self.coverage(ref, Checkpoint(marker, tuple(manifests)))

    def coverage(self, ref: CheckpointRef, checkpoint: Checkpoint) -> None:
        folder = self.paths.step_dir(ref.run, ref.step)
        tensors = self.attempt(folder, "fragments", lambda: logical_tensors(checkpoint, where=str(folder)))
        if tensors is None:
            return
        for row in tensors.filter(pc.not_equal(tensors["covered"], tensors["numel"])).to_pylist():
            message = f"the fragments hold {row['covered']} of {row['numel']} elements"
            self.add(folder, f"{row['kind']}/{row['name']}", message)

    def data(self, manifest: Manifest) -> None:
        """Check one data file. A symbolic link out of the history is a problem, and nothing behind it is read."""
        root = self.paths.root.resolve()
        files = {manifest.file, *manifest.table["file"].unique().to_pylist()}
        reached = {file: (root / file).resolve() for file in sorted(files)}
        for file, path in reached.items():
            if path != root / file:
                self.add(self.paths.root / file, "file", f"is behind a symbolic link, to {path}: nothing there is read")
        if any(path != root / file for file, path in reached.items()):
            return
        path = self.paths.root / manifest.file
        self.attempt(path, "header", lambda: check_header(self.paths.root, manifest))
        for found in check_data_file(self.paths.root, manifest, progress=self.progress, share=self.share):
            self.add(self.paths.root / found.file, found.field, found.message)

    def attempt(self, path: Path, field: str, call: Callable[[], T]) -> T | None:
        """Return the result of `call`, or None when it raises, which becomes a problem of the file at `path`."""
        try:
            return call()
        except (HistoryError, OSError) as error:
            self.add(path, field, str(error))
            return None

    def add(self, path: Path, field: str, message: str) -> None:
        self.problems.append(Problem(self.paths.relative(path), field, message))


def _missing_segments(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the names of segments that are missing, each with the next that is there. Each writer numbers its own from
    0 without gaps, so a missing one shows, unless it was the last."""
    missing: list[tuple[str, str]] = []
    expected: dict[str, int] = {}
    for segment in current_segments(names):
        if (first := expected.get(segment.writer, 0)) < segment.first:
            missing.append((Segment(segment.writer, first, first).name, segment.name))
        expected[segment.writer] = segment.last + 1
    return missing


def _check_redo(path: Path, *, run: str) -> None:
    segment = read_redo_segment(path, run=run)
    with open_blocks(segment) as read:
        for block in (block for step in segment.steps for block in step.blocks):
            read(block)


def _entries(folder: Path) -> list[Path]:
    """Return what a folder has, sorted; nothing when there is no real folder."""
    try:
        return sorted(folder.iterdir()) if is_real_folder(folder) else []
    except FileNotFoundError:
        return []
