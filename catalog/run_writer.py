"""What a training writes: the history's and the run's folders, parts of checkpoints, markers.

The commit protocol. Invariant: a checkpoint exists exactly when its marker does, and then all it names is durable.
  1. `begin`: data goes to a temporary name in the step's folder.
  2. `publish_part`: the folder's name is made durable, then the data file's, then the manifest's.
  3. `try_commit`: when the manifests of all ranks are there, the marker (a pure function of them) is published with
     link(2). Any rank may do it, several may try; it is written once.
  4. `register`: the index ingests what is committed; the index is derived, so nothing depends on it.
No run folder is ever written by two sessions: `create_run` makes it exclusively, and each rank holds a lock on its run
while it lives.
"""

import datetime
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from catalog.disk.durable import is_temporary, make_dirs, publish, publish_bytes, sync_dir, temporary_path
from catalog.disk.locks import free_lock, take_lock
from catalog.errors import MismatchError, SetupError, SnapshotError
from catalog.format.journal import Journal
from catalog.format.json_facts import encode_history, encode_run_facts, read_history_json
from catalog.format.manifest import encode_manifest
from catalog.format.marker import build_marker, encode_marker
from catalog.paths import HistoryPaths
from catalog.records import RunFacts

__all__ = ["RunWriter", "create_history", "create_run", "new_run_id"]


def new_run_id() -> str:
    """A run id that sorts by time and is unique by chance: date, time (UTC) and 24 random bits."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def create_history(root: Path) -> str:
    """Make the history at `root` unless it exists; returns its uuid. FormatError when it is of a newer format."""
    root.mkdir(parents=True, exist_ok=True)
    paths = HistoryPaths(root)
    if not paths.history_json.exists():
        strangers = [path.name for path in root.iterdir() if not path.name.startswith(".")]
        if strangers and not paths.runs.is_dir():
            raise SetupError(
                f"{root} is not a history and not empty ({', '.join(sorted(strangers)[:3])}): name another folder"
            )
        publish_bytes(encode_history(), paths.history_json, exclusive=True)
    make_dirs(paths.runs, root=root)
    return str(read_history_json(paths)["uuid"])


def create_run(root: Path, facts: RunFacts) -> None:
    """Make a run's folder, exclusively, with its facts. MismatchError when the run exists."""
    paths = HistoryPaths(root)
    folder = paths.run_dir(facts.run)
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise MismatchError(f"{folder} exists: a run is written by one session only; take a new id") from error
    for child in (paths.steps_dir(facts.run), paths.journal_dir(facts.run), paths.locks_dir(facts.run)):
        child.mkdir()
    publish_bytes(encode_run_facts(facts), paths.run_json(facts.run))
    sync_dir(paths.runs)


class RunWriter:
    """One rank's writing end of a run; holds the rank's lock until `close`. Its methods may be called from one
    background thread.
    """

    def __init__(self, root: Path, *, run: str, rank: int, world_size: int, layout: str) -> None:
        self.paths = HistoryPaths(root)
        self.run = run
        self.rank = rank
        self.world_size = world_size
        self.layout = layout
        self._lock = take_lock(self.paths.lock(run, rank))
        self.journal = Journal(self.paths.journal_dir(run), run=run, writer=f"rank-{rank:05d}", rank=rank)

    def begin(self, step: int) -> Path:
        """Make the step's folder; returns a temporary name for the data file in it. Waits for no disk: the folder is
        made durable by `publish_part`. SnapshotError when this rank's part of the step is published already."""
        if self.paths.manifest(self.run, step, self.rank).exists():
            raise SnapshotError(f"step {step} of run {self.run} is captured already by rank {self.rank}")
        self.paths.step_dir(self.run, step).mkdir(exist_ok=True)
        return temporary_path(self.paths.data(self.run, step, self.rank))

    def publish_part(self, step: int, *, data_tmp: Path, extents: pa.Table) -> None:
        """Publish this rank's data file, then the manifest of its extents (columns of `extents.SCHEMA`), which must say where every byte of it
        belongs: FormatError otherwise, and nothing is published. What the journal has gathered goes out before."""
        manifest = encode_manifest(
            extents,
            run=self.run,
            step=step,
            rank=self.rank,
            world_size=self.world_size,
            layout=self.layout,
            created=datetime.datetime.now(datetime.UTC),
        )
        self.journal.flush()
        sync_dir(self.paths.steps_dir(self.run))
        publish(data_tmp, self.paths.data(self.run, step, self.rank))
        publish_bytes(manifest, self.paths.manifest(self.run, step, self.rank))

    def try_commit(self, step: int) -> bool:
        """True when the checkpoint is committed now, by whichever rank; False while a part is missing."""
        marker = self.paths.marker(self.run, step)
        if marker.exists():
            return True
        if not all(self.paths.manifest(self.run, step, rank).exists() for rank in range(self.world_size)):
            return False
        content = build_marker(self.paths, run=self.run, step=step, world_size=self.world_size, layout=self.layout)
        publish_bytes(encode_marker(content), marker, exclusive=True)
        return True

    def register(self, *, patience_s: float = 0.1) -> int:
        """Ingest every committed checkpoint that the index does not have yet; how many. When others use the index for
        longer than the patience, 0: the next one does it. FormatError when the index itself is unusable."""
        from catalog.index import index

        return index.register(self.paths, patience_s=patience_s)

    def discard(self, step: int, *, reason: str) -> None:
        """Remove this rank's temporary files of a failed snapshot, and say so in the journal."""
        folder = self.paths.step_dir(self.run, step)
        if folder.is_dir():
            for path in folder.iterdir():
                if is_temporary(path.name) and path.name.startswith(f".rank-{self.rank:05d}."):
                    path.unlink(missing_ok=True)
        self.journal.event("failed", step, reason=reason)

    def close(self) -> None:
        """Flush the journal and let the lock go. Idempotent."""
        if self._lock >= 0:
            try:
                self.journal.flush()
            finally:
                free_lock(self._lock)
                self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
