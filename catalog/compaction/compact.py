"""Compacts the cold checkpoints of a run: every so many of them a key frame, and each of the others against the one
before it.

A key frame is packed by itself, so whoever reads a checkpoint unpacks at most two blocks for one. A checkpoint only
ever needs an earlier one, as with unchanged tensors, and removal keeps what others need. A data file that others were
packed against stays a key frame for ever, also when the next compaction is asked otherwise. Against a key frame that
turns out to be damaged nothing more is packed: the next checkpoint becomes a key frame.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from catalog.compaction.pack import Bases, bases_in, bytes_with_base, drop_data_files, pack_data_file
from catalog.errors import HistoryError, SetupError
from catalog.format.manifest import Manifest
from catalog.history import History
from catalog.paths import HistoryPaths, data_file, packed_file
from catalog.read.check_data import check_extents
from catalog.read.checkpoint import read_checkpoint
from catalog.read.data_files import only_packed
from catalog.read.locked_run import locked_run
from catalog.read.needed_files import bases_of
from catalog.read.runs import run_facts
from catalog.records import CheckpointRef

__all__ = ["Compacted", "CompactedStep", "compact_run", "compact_steps"]


@dataclass(frozen=True, slots=True)
class CompactedStep:
    """One checkpoint that was compacted: the bytes of its data files before, and of their images now. `base` is the
    step that it was packed against, None of a key frame."""

    ref: CheckpointRef
    raw_bytes: int
    packed_bytes: int
    base: int | None


@dataclass(slots=True)
class Compacted:
    """What was compacted, and what was left as it is, with the reason: also a damaged key frame that was packed
    before."""

    steps: list[CompactedStep] = field(default_factory=list)
    left: dict[CheckpointRef, str] = field(default_factory=dict)


def compact_run(
    history: History,
    run: str,
    steps: Sequence[int],
    *,
    key_every: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Compacted:
    """Compact some checkpoints of a run that nobody writes, in the order of their steps.

    key_every: of so many checkpoints one is a key frame
    progress: is called with the raw bytes that were packed since its last call

    SetupError when the run is being written, or may be. What can't be compacted, because it is damaged or somebody
    reads it, is left with the reason.
    """
    with locked_run(history.paths, run) as locked:
        if not locked:
            raise SetupError(f"run {run}: is being written, or may be: compact it when its training has ended")
        return compact_steps(history, run, steps, key_every=key_every, progress=progress)


def compact_steps(
    history: History,
    run: str,
    steps: Sequence[int],
    *,
    key_every: int,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Compacted:
    """Do what `compact_run` does, for a caller who holds the locks of the run. workers: threads that pack, by default
    one for each core."""
    done = Compacted()
    frames = _KeyFrames(history.paths, run, steps=history.steps(run), key_every=key_every)
    wanted = frozenset(steps)
    threads = workers or len(os.sched_getaffinity(0))
    for step in history.steps(run):
        ref = CheckpointRef(run, step)
        try:
            if not frames.is_packed(step):
                if step not in wanted:
                    continue
                done.steps.append(_compact(history.paths, ref, frames, threads, progress, done.left))
            frames.passed(step)
        except (HistoryError, OSError) as error:
            done.left[ref] = str(error)
    return done


def _compact(
    paths: HistoryPaths,
    ref: CheckpointRef,
    frames: "_KeyFrames",
    workers: int,
    progress: Callable[[int], None],
    left: dict[CheckpointRef, str],
) -> CompactedStep:
    """Compact one checkpoint; a key frame that is found damaged is left to itself, and told."""
    manifests = read_checkpoint(paths, ref.run, ref.step).manifests
    base = frames.base_for(ref.step, manifests)
    try:
        _pack(paths, manifests, base, frames, workers, progress)
    except (HistoryError, OSError):
        damage = frames.damage(base)
        if base is None or not damage:
            raise
        left[CheckpointRef(ref.run, base)] = f"{damage}: nothing more is packed against it"
        frames.forget()
        base = None
        _pack(paths, manifests, base, frames, workers, progress)
    drop_data_files(paths, ref, manifests)
    images = [(paths.root / packed_file(manifest.file)).stat().st_size for manifest in manifests]
    return CompactedStep(ref, sum(manifest.data_bytes for manifest in manifests), sum(images), base)


def _pack(
    paths: HistoryPaths,
    manifests: Sequence[Manifest],
    base: int | None,
    frames: "_KeyFrames",
    workers: int,
    progress: Callable[[int], None],
) -> None:
    for manifest in manifests:
        if not only_packed(paths.root, [manifest.file]):
            bases = frames.bases(base, rank=manifest.rank)
            pack_data_file(paths, manifest, bases=bases, workers=workers, progress=progress)


class _KeyFrames:
    """The key frames of a run, while its checkpoints are gone through in the order of their steps."""

    def __init__(self, paths: HistoryPaths, run: str, *, steps: Sequence[int], key_every: int) -> None:
        self._paths = paths
        self._run = run
        self._world_size = run_facts(paths, run).world_size
        self._key_every = key_every
        self._key: int | None = None
        self._since = 0
        self._manifests: Sequence[Manifest] = ()
        self._key_files: set[str] = set()
        self._needed: set[str] = set()
        for step in steps:
            try:
                self._needed.update(base for file in self._files(step) for base in bases_of(paths, file))
            except (HistoryError, OSError):
                # Nobody knows what it was packed against, so it may have been any of those before.
                self._needed.update(file for earlier in steps if earlier < step for file in self._files(earlier))

    def is_packed(self, step: int) -> bool:
        """Return whether nothing is left to do for a checkpoint."""
        files = self._files(step)
        return only_packed(self._paths.root, files) == frozenset(files)

    def base_for(self, step: int, manifests: Sequence[Manifest]) -> int | None:
        """Return the step that the next checkpoint is packed against; None when it becomes a key frame: it is its turn,
        others were packed against it, or the key frame before it has less than half of its bytes, as the state before
        an optimizer's first step."""
        is_key = self._since + 1 >= self._key_every or not self._needed.isdisjoint(self._files(step))
        return None if is_key or self._key is None or not self._has_most_of(manifests) else self._key

    def _has_most_of(self, manifests: Sequence[Manifest]) -> bool:
        found = [bytes_with_base(manifest, self.bases(self._key, rank=manifest.rank)) for manifest in manifests]
        return 2 * sum(found) >= sum(manifest.data_bytes for manifest in manifests)

    def bases(self, base: int | None, *, rank: int) -> Bases:
        """Return the extents against which a rank's part is packed."""
        return {} if base is None else bases_in(self._manifests[rank], files=frozenset(self._key_files))

    def damage(self, base: int | None) -> str:
        """Return what is wrong with the bytes of a key frame; "" when nothing is."""
        for manifest in () if base is None else self._manifests:
            for found in check_extents(self._paths.root, self.bases(base, rank=manifest.rank).values()):
                return f"{found.file}: {found.field}: {found.message}"
        return ""

    def forget(self) -> None:
        """Let the next checkpoint become a key frame."""
        self._key = None

    def passed(self, step: int) -> None:
        """Take note of a checkpoint that is packed: it is a key frame when it needs no other one."""
        files = self._files(step)
        if any(bases_of(self._paths, file) for file in files):
            self._since += 1
            return
        self._manifests = read_checkpoint(self._paths, self._run, step).manifests
        self._key, self._since = step, 0
        self._key_files.update(files)

    def _files(self, step: int) -> list[str]:
        return [data_file(self._run, step, rank) for rank in range(self._world_size)]
