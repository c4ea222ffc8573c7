"""The writing side of a history: folders of histories and runs, parts of checkpoints, and commit markers.

The commit protocol. Invariant: a checkpoint exists exactly when its marker exists, and then every file that the marker
names is durable.

1. `begin`: data is written under a temporary name in the step's folder. Readers ignore such names.
2. `publish_part`: the folder's name becomes durable, then the data file, then the manifest. The manifest comes last, so
   that a manifest is never durable without its data.
3. `try_commit`: once the manifests of all ranks exist, the marker, a pure function of them, is published with link(2).
   Any rank may do this and several may try at once; the marker is written once.
4. The index then ingests the checkpoint (`catalog.index.index.register`). The index is derived, so nothing depends on
   this step, and no checkpoint waits for it.

No two sessions ever write one run's folder: `create_run` creates it exclusively, and each rank holds a lock on its run
while it lives.
"""

import datetime
import secrets
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

import native
from catalog.disk.durable import (
    is_temporary,
    make_dirs,
    publish,
    publish_bytes,
    sync_dir,
    sync_dir_if_allowed,
    temporary_path,
)
from catalog.disk.locks import free_lock, take_lock
from catalog.errors import MismatchError, SetupError, SnapshotError
from catalog.format.journal import Journal
from catalog.format.json_facts import encode_history, encode_run_facts, read_history_json
from catalog.format.lock_file import lock_owner, write_lock_owner
from catalog.format.manifest import Manifest, bytes_in, encode_manifest
from catalog.format.marker import build_marker, encode_marker
from catalog.format.written_manifests import written_manifests
from catalog.paths import HistoryPaths, data_file
from catalog.read.run_order import RUN_NUMBER, next_number
from catalog.records import MarkerPart, RunFacts

__all__ = ["RunWriter", "create_history", "create_run", "new_run_id"]


def new_run_id() -> str:
    """Return a new run id: date and time (UTC), so that ids sort by time, and 24 random bits."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def create_history(root: Path) -> str:
    """Create the history at `root` unless it exists; return its uuid.

    SetupError when the folder has other contents; FormatError when a newer release wrote the history. Several processes
    may call this at once.
    """
    make_dirs(root, root=Path(root.absolute().anchor))
    paths = HistoryPaths(root)
    if not paths.history_json.exists():
        others = [path.name for path in root.iterdir() if not path.name.startswith(".")]
        if others and not paths.runs.is_dir():
            raise SetupError(
                f"{root} is not a history and not empty ({', '.join(sorted(others)[:3])}): name another folder"
            )
        publish_bytes(encode_history(), paths.history_json, exclusive=True)
    make_dirs(paths.runs, root=root)
    # Also when the folders were there: a process that was killed may have made them and not synced them.
    sync_dir(root)
    sync_dir_if_allowed(root.absolute().parent)
    return str(read_history_json(paths)["uuid"])


def create_run(root: Path, facts: RunFacts) -> None:
    """Create a run's folder with its facts, among them its number: it is the newest of the runs that are there.
    MismatchError when the run exists already."""
    paths = HistoryPaths(root)
    facts = replace(facts, facts={**facts.facts, RUN_NUMBER: next_number(paths)})
    folder = paths.run_dir(facts.run)
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise MismatchError(f"{folder} exists: a run is written by one session only; take a new id") from error
    for child in (paths.steps_dir, paths.journal_dir, paths.fingerprints_dir, paths.locks_dir):
        child(facts.run).mkdir()
    publish_bytes(encode_run_facts(facts), paths.run_json(facts.run))
    sync_dir(paths.runs)


class RunWriter:
    """One rank's writer of a run. It holds the rank's lock from construction until `close`: SetupError when another
    live process holds it. All methods must be called from one thread at a time; it may be a background thread.
    """

    def __init__(self, root: Path, *, run: str, rank: int, world_size: int, layout_hash: str) -> None:
        self.paths = HistoryPaths(root)
        self.run = run
        self.rank = rank
        self.world_size = world_size
        self.layout_hash = layout_hash
        lock = take_lock(self.paths.lock(run, rank))
        if lock is None:
            raise SetupError(
                f"{self.paths.lock(run, rank)}: another live process writes this rank of the run; only one may"
            )
        self._lock = lock
        try:
            write_lock_owner(lock, lock_owner())
        except OSError:
            free_lock(lock)
            raise
        self.journal = Journal(self.paths.journal_dir(run), run=run, writer=f"rank-{rank:05d}", rank=rank)
        self._published: tuple[int, MarkerPart | None] = (-1, None)

    def require_uncaptured(self, step: int) -> None:
        """Raise SnapshotError when this rank's part of the step is already published."""
        if self.paths.manifest(self.run, step, self.rank).exists():
            raise SnapshotError(f"step {step} of run {self.run} is captured already by rank {self.rank}")

    def begin(self, step: int) -> Path:
        """Create the step's folder and return a temporary name for the data file in it.

        This waits for no disk: `publish_part` makes the folder durable. SnapshotError when this rank's part of the step
        is already published.
        """
        self.require_uncaptured(step)
        self.paths.step_dir(self.run, step).mkdir(exist_ok=True)
        return temporary_path(self.paths.data(self.run, step, self.rank))

    def publish_part(self, step: int, *, data_tmp: Path, extents: pa.Table) -> None:
        """Publish this rank's data file and then its manifest; both are durable when this returns.

        `extents` has the columns of `catalog.format.extents.SCHEMA` and assigns every byte of the file to one extent:
        FormatError otherwise, and nothing is published. The journal is flushed first.
        """
        path, file = self.paths.manifest(self.run, step, self.rank), data_file(self.run, step, self.rank)
        manifest = Manifest(
            run=self.run,
            step=step,
            rank=self.rank,
            world_size=self.world_size,
            layout_hash=self.layout_hash,
            created=datetime.datetime.now(datetime.UTC),
            data_bytes=bytes_in(file, extents),
            table=extents,
        )
        encoded = encode_manifest(manifest)
        checksum = native.checksum(encoded)
        self.journal.flush()
        sync_dir(self.paths.steps_dir(self.run))
        publish(data_tmp, self.paths.data(self.run, step, self.rank))
        publish_bytes(encoded, path)
        written_manifests.add(checksum, manifest)
        part = MarkerPart(self.rank, self.paths.relative(path), checksum.hex(), file, manifest.data_bytes)
        self._published = step, part

    def try_commit(self, step: int) -> bool:
        """Commit the checkpoint once all parts are published. Return True when it is committed, by whichever rank;
        False while a part is missing. MismatchError when the parts do not belong together."""
        marker = self.paths.marker(self.run, step)
        if marker.exists():
            # Another rank made it, and may not have synced the folder yet: the caller relies on the checkpoint.
            sync_dir(marker.parent)
            return True
        if not all(self.paths.manifest(self.run, step, rank).exists() for rank in range(self.world_size)):
            return False
        published, own = self._published
        content = build_marker(
            self.paths,
            run=self.run,
            step=step,
            world_size=self.world_size,
            layout_hash=self.layout_hash,
            own=own if published == step else None,
        )
        publish_bytes(encode_marker(content), marker, exclusive=True)
        return True

    def discard(self, step: int, *, reason: str) -> None:
        """Remove this rank's temporary files of a failed snapshot and record the failure in the journal."""
        folder = self.paths.step_dir(self.run, step)
        if folder.is_dir():
            for path in folder.iterdir():
                if is_temporary(path.name) and path.name.startswith(f".rank-{self.rank:05d}."):
                    path.unlink(missing_ok=True)
        self.journal.event("failed", step, reason=reason)

    def note_shared_locks(self) -> None:
        """Write into the lock file that ranks on different hosts have seen each other's locks."""
        write_lock_owner(self._lock, replace(lock_owner(), shared=True))

    def close(self) -> None:
        """Flush the journal, merge its segments, and free the lock. Idempotent."""
        if self._lock >= 0:
            try:
                self.journal.close()
            finally:
                free_lock(self._lock)
                self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
