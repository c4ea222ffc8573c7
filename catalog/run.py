"""What a training writes: the history's and the run's folders, parts of checkpoints, markers.

The commit protocol. Invariant: a checkpoint exists exactly when its marker does, and then all it names is durable.
  1. `begin`: the step's folder is made durable; data goes to a temporary name in it.
  2. `publish_part`: data file renamed and its name made durable, then the manifest likewise.
  3. `try_commit`: when the manifests of all ranks are there, the marker (a pure function of them) is published with
     link(2). Any rank may do it, several may try; it is written once.
  4. `register`: the index ingests what is committed; the index is derived, so nothing depends on it.
No run folder is ever written by two sessions: `create_run` makes it exclusively, and each rank holds a lock on its run
while it lives.
"""

import datetime
import fcntl
import os
import secrets
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from catalog import jsonfile
from catalog.errors import FormatError, MismatchError, SetupError
from catalog.journal import Journal
from catalog.layout import FORMAT, HistoryPaths
from catalog.manifest import encode_manifest
from catalog.marker import build_marker, encode_marker
from catalog.publish import make_dirs, publish, publish_exclusive, sync_dir, write_new
from catalog.records import Extent, RunFacts

__all__ = ["RunWriter", "create_history", "create_run", "new_run_id"]


def new_run_id() -> str:
    """A run id that sorts by time and is unique by chance: date, time (UTC) and 24 random bits."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def create_history(root: Path) -> str:
    """Make the history at `root` unless it exists; returns its uuid. FormatError when it is of a newer format."""
    root.mkdir(parents=True, exist_ok=True)
    paths = HistoryPaths(root)
    content = {
        "format": FORMAT,
        "uuid": str(uuid.uuid4()),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if not paths.history_json.exists():
        strangers = [path.name for path in root.iterdir() if not path.name.startswith(".")]
        if strangers and not paths.runs.is_dir():
            raise SetupError(
                f"{root} is not a history and not empty ({', '.join(sorted(strangers)[:3])}): name another folder"
            )
        tmp = root / f".history.json.{secrets.token_hex(4)}.tmp"
        write_new(tmp, jsonfile.encode(content))
        publish_exclusive(tmp, paths.history_json)
    make_dirs(paths.runs, root=root)
    return read_history_json(paths)["uuid"]


def read_history_json(paths: HistoryPaths) -> dict[str, str]:
    """The checked content of history.json; FormatError when a newer release wrote it."""
    content = jsonfile.load(paths.history_json)
    if content.get("format") != FORMAT:
        raise FormatError(
            f"{paths.history_json}: field format: {content.get('format')}, this release reads {FORMAT}: use a newer release"
        )
    return content


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
    tmp = folder / ".run.json.tmp"
    write_new(
        tmp,
        jsonfile.encode(
            {
                "format": FORMAT,
                "run": facts.run,
                "created": facts.created,
                "world_size": facts.world_size,
                "parent_run": facts.parent_run,
                "parent_step": facts.parent_step,
                "layout": facts.layout,
                "facts": facts.facts,
            }
        ),
    )
    publish(tmp, paths.run_json(facts.run))
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
        self._lock = _take_lock(self.paths.lock(run, rank))
        self.journal = Journal(self.paths.journal_dir(run), writer=f"rank-{rank:05d}", rank=rank)

    def begin(self, step: int) -> Path:
        """Make the step's folder durable; returns the temporary name for the data file, in the same folder."""
        folder = self.paths.step_dir(self.run, step)
        make_dirs(folder, root=self.paths.root)
        return self._temporary(step, "safetensors")

    def publish_part(self, step: int, *, data_tmp: Path, extents: Sequence[Extent]) -> None:
        """Publish this rank's durable data file, then the manifest of its extents."""
        publish(data_tmp, self.paths.data(self.run, step, self.rank))
        manifest_tmp = self._temporary(step, "manifest.parquet")
        encoded = encode_manifest(
            extents, run=self.run, step=step, rank=self.rank, world_size=self.world_size, layout=self.layout
        )
        write_new(manifest_tmp, encoded)
        publish(manifest_tmp, self.paths.manifest(self.run, step, self.rank))

    def try_commit(self, step: int) -> bool:
        """True when the checkpoint is committed now, by whichever rank; False while a part is missing."""
        marker = self.paths.marker(self.run, step)
        if marker.exists():
            return True
        if not all(self.paths.manifest(self.run, step, rank).exists() for rank in range(self.world_size)):
            return False
        content = build_marker(self.paths, run=self.run, step=step, world_size=self.world_size, layout=self.layout)
        tmp = self._temporary(step, "commit.json")
        tmp.unlink(missing_ok=True)
        write_new(tmp, encode_marker(content))
        publish_exclusive(tmp, marker)
        return True

    def discard(self, step: int, *, reason: str) -> None:
        """Remove this rank's temporary files of a failed snapshot, and say so in the journal."""
        for suffix in ("safetensors", "manifest.parquet", "commit.json"):
            self._temporary(step, suffix).unlink(missing_ok=True)
        self.journal.event("failed", step, reason=reason)

    def close(self) -> None:
        """Flush the journal and let the lock go. Idempotent."""
        if self._lock >= 0:
            try:
                self.journal.flush()
            finally:
                os.close(self._lock)
                self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _temporary(self, step: int, suffix: str) -> Path:
        return self.paths.step_dir(self.run, step) / f".rank-{self.rank:05d}.{suffix}.tmp"


def _take_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise SetupError(f"{path}: another live process writes this rank of the run") from error
    return descriptor
