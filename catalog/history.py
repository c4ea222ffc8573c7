"""What a reader sees of a history: runs, checkpoints, extents, and SQL. Cheap to open; holds no lock and no file.

Manifests and markers are the truth; only `query`, tags and "best" go through the index, and they work without it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from catalog.disk.locks import run_is_held
from catalog.errors import NotFoundError
from catalog.format.json_facts import read_history_json, read_run_facts, run_names
from catalog.format.marker import read_marker
from catalog.paths import HistoryPaths, parse_step_dir
from catalog.read.checkpoint import check_data_files, read_checkpoint
from catalog.read.tensors import logical_tensors
from catalog.records import CheckpointRef, Extent, Marker, RunFacts
from catalog.references import resolve

if TYPE_CHECKING:
    from catalog.index.index import Asking

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
        return read_run_facts(self.paths, run)

    def runs(self) -> list[RunFacts]:
        """All runs, oldest first."""
        return sorted(
            (self.run_facts(name) for name in run_names(self.paths)), key=lambda facts: (facts.created, facts.run)
        )

    def current_run(self) -> str:
        """The newest training run: what an int step means. A replay never becomes current."""
        training = [facts for facts in self.runs() if not facts.facts.get("replay")]
        if not training:
            raise NotFoundError(
                f"the history {self.root} has no run yet: a training with `capture.enable(..., history={str(self.root)!r})` makes one"
            )
        return training[-1].run

    def steps(self, run: str) -> list[int]:
        """The committed steps of a run, ascending."""
        folder = self.paths.steps_dir(run)
        marker = self.paths.marker(run, 0).name
        # A path object for each of ten thousand would take longer than the look itself.
        return [step for step in self.step_dirs(run) if os.path.exists(f"{folder}/{step:012d}/{marker}")]  # noqa: PTH110

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
        """committed: its marker exists; failed: a rank said so, or its files can't be trusted; pending: the run's
        processes live; incomplete: they do not. NotFoundError when nothing was ever begun there."""
        if self.paths.marker(run, step).exists():
            return "committed"
        rows = self.query("SELECT state FROM checkpoints WHERE run = ? AND step = ?", [run, step]).to_pylist()
        if not rows:
            raise NotFoundError(f"step {step} of run {run} was never begun in {self.root}")
        state: State = rows[0]["state"]
        return state

    def held(self, run: str) -> bool:
        """Whether any live process writes this run."""
        return run_is_held(self.paths, run)

    def resolve(self, ref: int | str | CheckpointRef) -> CheckpointRef:
        """The committed checkpoint that `ref` names: an int (in the lineage of the current run), "latest", -1, "best",
        or a tag; "run:step", "run:latest", "run:-1", "run:best" among the checkpoints of that run alone.
        """
        return resolve(self, ref)

    def marker(self, ref: CheckpointRef) -> Marker:
        """The commit marker. NotFoundError when the checkpoint is not committed."""
        return read_marker(self.paths, ref.run, ref.step)

    def extents(
        self, ref: CheckpointRef, *, names: Sequence[str] | None = None, kinds: Sequence[str] | None = None
    ) -> list[Extent]:
        """The extents of all ranks, sorted by (kind, name, start), optionally of some names and kinds.

        Every manifest is checked against the marker, paths, sizes and overlaps before anything is returned: FormatError
        or CorruptError names file and field.
        """
        checkpoint = read_checkpoint(self.paths, ref.run, ref.step)
        check_data_files(self.paths, checkpoint)
        logical_tensors(checkpoint, where=str(self.paths.step_dir(ref.run, ref.step)))
        wanted_names = None if names is None else set(names)
        wanted_kinds = None if kinds is None else set(kinds)
        chosen = [
            extent
            for manifest in checkpoint.manifests
            for extent in manifest.extents()
            if (wanted_names is None or extent.name in wanted_names)
            and (wanted_kinds is None or extent.kind in wanted_kinds)
        ]
        return sorted(chosen, key=lambda extent: (extent.kind, extent.name, extent.start, extent.file))

    def query(self, sql: str, params: Sequence[object] | Mapping[str, object] = ()) -> pa.Table:
        """The result of read-only SQL over the tables of the catalog (docs/format.md); it sees every committed
        checkpoint.

        Works while any process holds the index file; the query itself can neither write nor reach other files.
        """
        from catalog.index import index

        return index.query(self.paths, sql, params)

    @contextmanager
    def asking(self) -> Iterator[Asking]:
        """For several queries about the same moment, which take less time together: gives what is called as `query` is. Writers
        wait meanwhile, so nothing long may go on in between."""
        from catalog.index import index

        with index.asking(self.paths) as ask:
            yield ask

    def reindex(self) -> int:
        """Delete the index and build it anew from the manifests; returns the number of checkpoints in it."""
        from catalog.index import index

        return index.reindex(self.paths)
