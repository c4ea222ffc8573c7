"""What a reader sees of a history: runs, checkpoints, extents, and SQL. Cheap to open; holds no lock and no file.

Manifests and markers are the truth; only `query`, tags and "best" go through the index, and they work without it too.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa

import native
from catalog import index, jsonfile
from catalog.errors import CorruptError, FormatError, NotFoundError
from catalog.layout import HistoryPaths, parse_step_dir
from catalog.manifest import decode_manifest
from catalog.marker import read_marker
from catalog.records import CheckpointRef, Extent, Marker, RunFacts
from catalog.resolve import resolve
from catalog.run import read_history_json

__all__ = ["History", "State"]

State = Literal["pending", "committed", "incomplete", "failed"]


class History:
    """One history, by its folder. Every method reads anew what can have changed."""

    def __init__(self, root: Path, *, uuid: str) -> None:
        self.paths = HistoryPaths(root)
        self.root = root
        self.uuid = uuid

    @classmethod
    def open(cls, path: Path | str) -> History:
        """Open the history at `path`. NotFoundError when there is none, FormatError when a newer release wrote it."""
        root = Path(path).expanduser().resolve()
        paths = HistoryPaths(root)
        if not paths.history_json.is_file():
            raise NotFoundError(
                f"no history at {root} (no history.json there): `capture.enable(..., history={str(root)!r})` makes one in a training"
            )
        return cls(root, uuid=read_history_json(paths)["uuid"])

    def run_facts(self, run: str) -> RunFacts:
        """The facts of one run. NotFoundError names the runs that exist."""
        path = self.paths.run_json(run)
        try:
            content = jsonfile.load(path)
        except FileNotFoundError as error:
            names = ", ".join(self._run_names()) or "none"
            raise NotFoundError(f"no run {run!r} in {self.root}: there are {names}") from error
        try:
            facts = RunFacts(**{key: value for key, value in content.items() if key != "format"})
        except TypeError as error:
            raise FormatError(f"{path}: a field is missing or unknown: {error}") from error
        if facts.run != run:
            raise FormatError(f"{path}: field run: {facts.run!r} in the folder of {run!r}")
        return facts

    def runs(self) -> list[RunFacts]:
        """All runs, oldest first."""
        return sorted(
            (self.run_facts(name) for name in self._run_names()), key=lambda facts: (facts.created, facts.run)
        )

    def current_run(self) -> str:
        """The newest training run: what an int step means. A replay never becomes current."""
        training = [facts for facts in self.runs() if not facts.facts.get("replay")]
        if not training:
            raise NotFoundError(f"the history {self.root} has no run yet")
        return training[-1].run

    def steps(self, run: str) -> list[int]:
        """The committed steps of a run, ascending."""
        return [step for step in self.step_dirs(run) if self.paths.marker(run, step).exists()]

    def step_dirs(self, run: str) -> list[int]:
        """The steps that have a folder, committed or not, ascending."""
        try:
            names = os.listdir(self.paths.steps_dir(run))
        except FileNotFoundError:
            return []
        return sorted(step for step in map(parse_step_dir, names) if step is not None)

    def checkpoints(self, run: str | None = None, *, state: State | None = "committed") -> list[CheckpointRef]:
        """Checkpoints of a run, or of all runs (oldest run first), in one state or (None) in any."""
        runs = [run] if run is not None else [facts.run for facts in self.runs()]
        return [
            CheckpointRef(name, step)
            for name in runs
            for step in self.step_dirs(name)
            if state is None or self.state(name, step) == state
        ]

    def state(self, run: str, step: int) -> State:
        """committed: its marker exists; pending: the run's processes live; incomplete: they do not."""
        if self.paths.marker(run, step).exists():
            return "committed"
        return "pending" if self.held(run) else "incomplete"

    def held(self, run: str) -> bool:
        """Whether any live process writes this run."""
        locks = self.paths.locks_dir(run)
        return locks.is_dir() and any(_is_locked(path) for path in locks.iterdir())

    def resolve(self, ref: int | str | CheckpointRef) -> CheckpointRef:
        """The committed checkpoint that `ref` names: an int (in the lineage of the current run), "run:step", "latest",
        -1, "best", or a tag.
        """
        return resolve(self, ref)

    def marker(self, ref: CheckpointRef) -> Marker:
        """The commit marker. NotFoundError when the checkpoint is not committed."""
        try:
            return read_marker(self.paths, ref.run, ref.step)
        except FileNotFoundError as error:
            state = self.state(ref.run, ref.step) if ref.step in self.step_dirs(ref.run) else "not there"
            raise NotFoundError(f"checkpoint {ref} of {self.root} is {state}, not committed") from error

    def extents(
        self, ref: CheckpointRef, *, names: Sequence[str] | None = None, kinds: Sequence[str] | None = None
    ) -> list[Extent]:
        """The extents of all ranks, sorted by (kind, name, start), optionally of some names and kinds.

        Every manifest is checked against the marker, paths, sizes and overlaps before anything is returned: FormatError
        or CorruptError names file and field.
        """
        marker = self.marker(ref)
        extents: list[Extent] = []
        for part in marker.parts:
            extents += self._part(marker, part.manifest, part.manifest_checksum)
        self._check_files(marker, extents)
        wanted_names = None if names is None else set(names)
        wanted_kinds = None if kinds is None else set(kinds)
        chosen = [
            extent
            for extent in extents
            if (wanted_names is None or extent.name in wanted_names)
            and (wanted_kinds is None or extent.kind in wanted_kinds)
        ]
        return sorted(chosen, key=lambda extent: (extent.kind, extent.name, extent.start, extent.file))

    def query(self, sql: str, params: Sequence[object] | Mapping[str, object] = ()) -> pa.Table:
        """The result of read-only SQL over the tables of the catalog (docs/format.md); it sees every committed
        checkpoint.

        Works while any process holds the index file; the query itself can neither write nor reach other files.
        """
        return index.query(self.paths, sql, params)

    def reindex(self) -> int:
        """Delete the index and build it anew from the manifests; returns the number of checkpoints in it."""
        return index.reindex(self.paths)

    def _run_names(self) -> list[str]:
        try:
            names = os.listdir(self.paths.runs)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if (self.paths.runs / name / "run.json").is_file())

    def _part(self, marker: Marker, manifest: str, checksum: str) -> list[Extent]:
        path = self.root / manifest
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise CorruptError(
                f"{path}: the file is missing, the marker of {marker.run}:{marker.step} names it"
            ) from error
        actual = native.checksum(data).hex()
        if actual != checksum:
            raise CorruptError(
                f"{path}: field manifest_checksum: the marker says {checksum}, the file gives {actual}: the file was changed or damaged"
            )
        return decode_manifest(data, path=path)[0]

    def _check_files(self, marker: Marker, extents: Sequence[Extent]) -> None:
        sizes = {part.data: part.data_bytes for part in marker.parts}
        by_file: dict[str, list[Extent]] = {}
        for extent in extents:
            by_file.setdefault(extent.file, []).append(extent)
        for file, members in by_file.items():
            size = _file_bytes(self.root, file, marker)
            if file in sizes and size != sizes[file]:
                raise CorruptError(
                    f"{self.root / file}: {size} bytes, the marker says {sizes[file]}: truncated or changed"
                )
            at = 0
            for extent in sorted(members, key=lambda extent: (extent.offset, extent.nbytes)):
                if extent.offset < at:
                    raise FormatError(
                        f"{self.root / file}: field offset: {extent.kind}/{extent.name} overlaps byte {at}"
                    )
                at = extent.offset + extent.nbytes
            if at > size:
                raise FormatError(
                    f"{self.root / file}: field nbytes: extents reach byte {at} of a file of {size} bytes"
                )


def _file_bytes(root: Path, file: str, marker: Marker) -> int:
    path = root / file
    if not path.resolve().is_relative_to(root):
        raise FormatError(f"{path}: field file: leads out of the history {root}")
    try:
        return path.stat().st_size
    except FileNotFoundError as error:
        raise CorruptError(f"{path}: the file is missing, checkpoint {marker.run}:{marker.step} needs it") from error


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
