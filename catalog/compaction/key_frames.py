"""Key frames: which checkpoint of a run is packed by itself, and which one against another.

A key frame is packed by itself, so whoever reads a checkpoint unpacks at most two blocks for one. A checkpoint only
ever needs an earlier one, as with unchanged tensors, and removal keeps what others need. A data file that others were
packed against stays a key frame for ever, also when the next compaction is asked otherwise. Against a key frame that
turns out to be damaged nothing more is packed: the next checkpoint becomes a key frame.
"""

from collections.abc import Callable, Sequence

from catalog.compaction.pack import Bases, bases_in, bytes_with_base, pack_data_file
from catalog.data_files.check_data import check_extents
from catalog.data_files.data_files import only_packed
from catalog.data_files.needed_files import NeededFile, bases_of, missing_file
from catalog.disk.durable import is_full
from catalog.errors import HistoryError
from catalog.format.manifest import Manifest
from catalog.paths import HistoryPaths, data_file
from catalog.read.checkpoint import read_checkpoint
from catalog.read.runs import run_facts

__all__ = ["KeyFrames"]


class KeyFrames:
    """The key frames of a run, while its checkpoints are gone through in the order of their steps.

    key_every: of so many checkpoints one is a key frame
    """

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
        self.damaged: dict[int, str] = {}
        """The key frames that were found damaged, and what is wrong with each."""
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
        others were packed against it, or the last key frame is a later one, was removed, or has less than half of its
        bytes, as the state before an optimizer's first step."""
        is_key = self._since + 1 >= self._key_every or not self._needed.isdisjoint(self._files(step))
        if is_key or self._key is None or self._key > step:
            return None
        if missing_file(self._paths, map(_any_size, self._files(self._key))):
            return None
        return self._key if self._has_most_of(manifests) else None

    def _has_most_of(self, manifests: Sequence[Manifest]) -> bool:
        found = [bytes_with_base(manifest, self.bases(self._key, rank=manifest.rank)) for manifest in manifests]
        return 2 * sum(found) >= sum(manifest.data_bytes for manifest in manifests)

    def bases(self, base: int | None, *, rank: int) -> Bases:
        """Return the extents against which a rank's part is packed."""
        return {} if base is None else bases_in(self._manifests[rank], files=frozenset(self._key_files))

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

    def pack(
        self,
        step: int,
        *,
        alone: bool,
        workers: int,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> tuple[Sequence[Manifest], int | None]:
        """Put the images of a checkpoint's data files beside them. Return its manifests, and the step that it was
        packed against, None of a key frame. The other arguments, and the errors, are those of `pack_data_file`; a key
        frame that is found damaged is left to itself, and `damaged` names it."""
        manifests = read_checkpoint(self._paths, self._run, step).manifests
        base = self.base_for(step, manifests)
        try:
            self._pack(manifests, base, alone, workers, progress)
        except (HistoryError, OSError) as error:
            damage = "" if is_full(error) else self._damage(base)
            if base is None or not damage:
                raise
            self.damaged[base] = f"{damage}: nothing more is packed against it"
            self._key = base = None
            self._pack(manifests, base, alone, workers, progress)
        return manifests, base

    def _pack(
        self,
        manifests: Sequence[Manifest],
        base: int | None,
        alone: bool,
        workers: int,
        progress: Callable[[int], None],
    ) -> None:
        for manifest in manifests:
            if not only_packed(self._paths.root, [manifest.file]):
                bases = self.bases(base, rank=manifest.rank)
                pack_data_file(self._paths, manifest, bases=bases, alone=alone, workers=workers, progress=progress)

    def _damage(self, base: int | None) -> str:
        """Return what is wrong with the bytes of a key frame; "" when nothing is."""
        for manifest in () if base is None else self._manifests:
            for found in check_extents(self._paths.root, self.bases(base, rank=manifest.rank).values()):
                return f"{found.file}: {found.field}: {found.message}"
        return ""


def _any_size(file: str) -> NeededFile:
    return NeededFile(file, 0)
