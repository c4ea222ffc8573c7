"""The reading side of a history: runs, checkpoints, extents, and SQL. Cheap to open; holds no lock and no file.

Manifests and markers are the truth. Only `query`, `asking`, `state`, tags and "best" use the index, and they answer
without it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.compute as pc

from catalog import references
from catalog.errors import NotFoundError, SetupError
from catalog.format.extents import extent_records
from catalog.format.json_facts import read_history_json
from catalog.format.marker import read_marker
from catalog.paths import HistoryPaths
from catalog.read import run_order, runs
from catalog.read.checkpoint import check_data_files, read_checkpoint
from catalog.read.provider_tensors import state_only
from catalog.read.tensors import logical_tensors
from catalog.records import CheckpointRef, Extent, Marker, RunFacts

if TYPE_CHECKING:
    from catalog.index.index import Asking
    from catalog.index.registered import Gone

__all__ = ["History", "State"]

State = Literal["pending", "committed", "incomplete", "failed"]


class History:
    """One history, opened by its folder. Every method reads again whatever can have changed."""

    def __init__(self, root: Path, *, uuid: str) -> None:
        self.paths = HistoryPaths(root)
        self.root = root
        self.uuid = uuid

    def __repr__(self) -> str:
        return f"<History: {self.root}>"

    @classmethod
    def open(cls, path: Path | str) -> History:
        """Open the history at `path`. NotFoundError when there is none, FormatError when a newer release wrote it."""
        if not isinstance(path, (str, os.PathLike)) or "\0" in os.fspath(path):
            raise SetupError(f"a history is opened by the path of its folder, not by {path!r}")
        root = Path(path).expanduser().resolve()
        paths = HistoryPaths(root)
        if not paths.history_json.is_file():
            raise NotFoundError(
                f"no history at {root} (no history.json there): `capture.enable(..., history={str(root)!r})` makes one "
                "in a training"
            )
        return cls(root, uuid=read_history_json(paths)["uuid"])

    def run_facts(self, run: str) -> RunFacts:
        """Return the facts of one run. NotFoundError names the runs that exist."""
        return runs.run_facts(self.paths, run)

    def run_named(self, name: str) -> str:
        """Return the run that is called `name`, or the only one that begins with it. NotFoundError names those that
        begin so, or the runs that exist."""
        return runs.run_named(self.paths, name)

    def runs(self) -> list[RunFacts]:
        """Return the facts of all runs, oldest first."""
        return run_order.runs(self.paths)

    def current_run(self) -> str:
        """Return the newest training run, the one that an int step refers to. A replay never becomes current.
        NotFoundError when the history has no run."""
        return run_order.current_run(self.paths)

    def steps(self, run: str) -> list[int]:
        """Return the committed steps of a run, ascending."""
        return runs.steps(self.paths, run)

    def step_dirs(self, run: str) -> list[int]:
        """Return the steps that have a folder, committed or not, ascending."""
        return runs.step_dirs(self.paths, run)

    def checkpoints(self, run: str | None = None, *, state: State | None = "committed") -> list[CheckpointRef]:
        """Return the checkpoints of a run, or of all runs (oldest run first), that are in `state`, or in any state when
        it is None."""
        names = [run] if run is not None else [facts.run for facts in self.runs()]
        listed = self.steps if state == "committed" else self.step_dirs
        found = (CheckpointRef(name, step) for name in names for step in listed(name))
        return [ref for ref in found if state in (None, "committed") or self._is_in(state, ref)]

    def _is_in(self, state: State | None, ref: CheckpointRef) -> bool:
        try:
            return self.state(ref.run, ref.step) == state
        except NotFoundError:
            # Removed since it was listed.
            return False

    def state(self, run: str, step: int) -> State:
        """Return the state of a checkpoint. NotFoundError when the step was never begun.

        - committed: its marker exists.
        - failed: a rank recorded a failure, or a file of it can't be trusted.
        - pending: it has no marker, and a process of the run lives.
        - incomplete: it has no marker, and no process of the run lives.
        """
        if self.paths.marker(run, step).exists():
            return "committed"
        rows = self.query("SELECT state FROM checkpoints WHERE run = ? AND step = ?", [run, step]).to_pylist()
        if not rows:
            raise NotFoundError(f"step {step} of run {run} was never begun in {self.root}")
        state: State = rows[0]["state"]
        return state

    def held(self, run: str) -> bool:
        """Return whether a live process writes this run."""
        return runs.run_is_held(self.paths, run)

    def resolve(self, ref: int | str | CheckpointRef, *, run: str | None = None) -> CheckpointRef:
        """Return the committed checkpoint that `ref` names.

        An int (in the lineage of `run`, else of the current run), "latest", -1, "best" or a tag; "run:step",
        "run:latest", "run:-1" and "run:best" choose among the checkpoints of that run alone, of which the beginning of
        its name is enough. NotFoundError names the nearest that exist, SetupError says that `ref` is not a reference.
        """
        return references.resolve(self.paths, ref, run)

    def marker(self, ref: CheckpointRef) -> Marker:
        """Return the commit marker. NotFoundError when the checkpoint is not committed."""
        return read_marker(self.paths, ref.run, ref.step)

    def extents(
        self, ref: CheckpointRef, *, names: Sequence[str] | None = None, kinds: Sequence[str] | None = None
    ) -> list[Extent]:
        """Return the extents of all ranks, sorted by (kind, name, start), optionally only some names and kinds.

        Every manifest is checked against the marker before anything is returned, and so are paths, sizes and overlaps:
        FormatError or CorruptError names file and field.
        """
        return _records(self._rows(ref), names, kinds)

    def state_extents(
        self, ref: CheckpointRef, *, names: Sequence[str] | None = None, kinds: Sequence[str] | None = None
    ) -> list[Extent]:
        """Return the extents that are tensors, as `extents` does: those of the training's own state, and those inside
        the objects of its State Providers, each of which has the object's name as its kind, and its place in the object
        as its name. Objects, headers and padding are left out.
        """
        return _records(state_only(self._rows(ref)), names, kinds)

    def _rows(self, ref: CheckpointRef) -> pa.Table:
        """Return the rows of the manifests of all ranks, all of which agree."""
        checkpoint = read_checkpoint(self.paths, ref.run, ref.step)
        check_data_files(self.paths, checkpoint)
        logical_tensors(checkpoint, where=str(self.paths.step_dir(ref.run, ref.step)))
        return pa.concat_tables(manifest.table for manifest in checkpoint.manifests)

    def gone(self) -> list[Gone]:
        """Return what the index has registered and the folders no longer have, though nobody has removed the whole
        checkpoint: markers, run.json files and journal segments."""
        from catalog.index import registered

        return registered.gone(self.paths)

    def query(self, sql: str, params: Sequence[object] | Mapping[str, object] = ()) -> pa.Table:
        """Return the result of one SELECT over the views of the catalog (docs/format.md), every committed checkpoint
        included. SetupError when `sql` is not one SELECT, or when it fails.

        The query works while any process holds the index file, and can neither write nor reach other files.
        """
        from catalog.index import index

        return index.query(self.paths, sql, params)

    @contextmanager
    def asking(self) -> Iterator[Asking]:
        """Yield a callable like `query` for several queries about the same moment, which together take less time.

        Writers of the index wait until the body ends, so the body must be short.
        """
        from catalog.index import index

        with index.asking(self.paths) as ask:
            yield ask

    def reindex(self) -> int:
        """Delete the index and build it again from the files; return the number of checkpoints in it. SetupError when
        another client holds the file all the time."""
        from catalog.index import index

        return index.reindex(self.paths)


def _records(rows: pa.Table, names: Sequence[str] | None, kinds: Sequence[str] | None) -> list[Extent]:
    # Rows become records one by one, which is most of the work: only those that were asked for do.
    for column, wanted in (("name", names), ("kind", kinds)):
        if wanted is not None:
            rows = rows.filter(pc.is_in(rows[column], pa.array(list(wanted), pa.string())))
    return sorted(extent_records(rows), key=lambda extent: (extent.kind, extent.name, extent.start, extent.file))
