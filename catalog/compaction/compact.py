"""Compacts the cold checkpoints of a run: every so many of them a key frame, and each of the others against the one
before it.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from catalog.access.locked_run import locked_run
from catalog.compaction.key_frames import KeyFrames
from catalog.compaction.pack import drop_data_files
from catalog.errors import HistoryError, SetupError
from catalog.history import History
from catalog.paths import HistoryPaths, packed_file
from catalog.records import CheckpointRef

__all__ = ["Compacted", "CompactedStep", "compact_run"]


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
    """Says what was compacted, and what was left as it is, with the reason: also a damaged key frame that was packed
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
        return _compact_steps(history, run, steps, key_every, progress)


def _compact_steps(
    history: History, run: str, steps: Sequence[int], key_every: int, progress: Callable[[int], None]
) -> Compacted:
    done = Compacted()
    frames = KeyFrames(history.paths, run, steps=history.steps(run), key_every=key_every)
    wanted = frozenset(steps)
    for step in history.steps(run):
        ref = CheckpointRef(run, step)
        try:
            if not frames.is_packed(step):
                if step not in wanted:
                    continue
                done.steps.append(_compact(history.paths, ref, frames, progress))
            frames.passed(step)
        except (HistoryError, OSError) as error:
            done.left[ref] = str(error)
    done.left.update({CheckpointRef(run, step): reason for step, reason in frames.damaged.items()})
    return done


def _compact(
    paths: HistoryPaths, ref: CheckpointRef, frames: KeyFrames, progress: Callable[[int], None]
) -> CompactedStep:
    workers = len(os.sched_getaffinity(0))
    manifests, base = frames.pack(ref.step, alone=True, workers=workers, progress=progress)
    drop_data_files(paths, ref, [manifest.file for manifest in manifests])
    images = [(paths.root / packed_file(manifest.file)).stat().st_size for manifest in manifests]
    return CompactedStep(ref, sum(manifest.data_bytes for manifest in manifests), sum(images), base)
