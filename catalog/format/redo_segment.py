"""Segments of a redo log: what the optimizer's updates of some steps consumed, so that these steps can be made again.

    blocks, one after the other  |  the footer, canonical JSON with its checksum  |  its length, 8 bytes  |  DSHREDO1

A block has the packed bytes of one gradient, one changed buffer or object, or a part of a large one, and the footer has
its checksum: so a flipped bit anywhere in a segment is found. Here are the records of a segment, and its name;
`catalog.format.redo_writer` writes a segment, and `catalog.format.redo_reader` reads it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from catalog.disk.regular_file import is_real_folder
from catalog.paths import HistoryPaths
from catalog.records import Placement

__all__ = [
    "BIAS_CORRECTION_SINCE",
    "BLOCK_BYTES",
    "MAGIC",
    "RedoBlock",
    "RedoFlat",
    "RedoFragment",
    "RedoKind",
    "RedoSegment",
    "RedoSegmentName",
    "RedoStep",
    "RedoTensor",
    "RedoWrites",
    "is_redo_segment",
    "parse_redo_name",
    "redo_segments",
]

BLOCK_BYTES: Final = 16 << 20
"""A block stands for at most so many bytes of a tensor, which bounds the memory of whoever packs and unpacks."""

BIAS_CORRECTION_SINCE: Final = "bias_correction_since"
"""Param groups have this beside their hyperparameters where the products of betas by which their optimizer corrects its
bias come from a power: the number of the update that took it. Without it they come from the first update."""

MAGIC: Final = b"DSHREDO1"
"""A segment ends with it."""

_NAME: Final = re.compile(r"rank-([0-9]{5})-([0-9]{12})-to-([0-9]{12})\.redo")

RedoKind = Literal["gradient", "buffer", "object"]


@dataclass(frozen=True, slots=True)
class RedoFragment:
    """Elements `[offset, offset + numel)` of a flat tensor are `[start, start + numel)` of the parameter `name`."""

    name: str
    start: int
    numel: int
    offset: int


@dataclass(frozen=True, slots=True)
class RedoFlat:
    """A tensor that an optimizer updates in the place of parameters, as DeepSpeed's do; what no fragment holds is
    padding.

    placement: "partitioned" where each rank has another part of the parameters, "replicated" where all have the same
    is_model: whether its elements are the model's own; else they are its master weights, of which the model has rounded
       copies
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: Placement
    is_model: bool
    fragments: tuple[RedoFragment, ...]


@dataclass(frozen=True, slots=True)
class RedoWrites:
    """Describes what the updates of a segment write.

    params: the names of the tensors of each param group, in order: of parameters, or of `flats`
    flats: the flat tensors; none where the optimizer updates the parameters themselves
    calls: the names that each call of the optimizer updates, in order, where several make one update; none where one
       call updates all
    world_size: the number of ranks, each of which has a log of its own
    """

    params: tuple[tuple[str, ...], ...]
    flats: tuple[RedoFlat, ...] = ()
    calls: tuple[tuple[str, ...], ...] = ()
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class RedoTensor:
    """A tensor of which a segment has bytes: the gradient of a parameter or a flat tensor, a buffer that forward
    changes, or the text of the JSON tree of a provider's object. An object without bytes was too large to be recorded.
    """

    kind: RedoKind
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RedoBlock:
    """Bytes of the segment's tensor number `tensor`, `nbytes` of them, in `stored` bytes of the file at `offset`."""

    tensor: int
    nbytes: int
    offset: int
    stored: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class RedoStep:
    """One step: the hyperparameters of each param group and what changed, in blocks. The blocks of a tensor follow each
    other; a parameter without one had no gradient.

    broken: why the state after this step is not what the update has made of the state before; None where it is
    applied: False where the update was skipped, as on an overflow: nothing but objects and buffers has changed
    counted_twice: whether the step was made twice, because a load has counted the steps back, and has a checkpoint of
       the second time. Such a step is broken, and another segment's record of it, of the first time, does not count
    """

    step: int
    groups: Any
    broken: str | None
    blocks: tuple[RedoBlock, ...]
    applied: bool
    counted_twice: bool = False


@dataclass(frozen=True, slots=True)
class RedoSegment:
    """One segment as its footer describes it. `rule` is what the bits of an update depend on beside its input."""

    path: Path
    run: str
    rank: int
    rule: Mapping[str, Any]
    writes: RedoWrites
    tensors: tuple[RedoTensor, ...]
    steps: tuple[RedoStep, ...]


@dataclass(frozen=True, slots=True, order=True)
class RedoSegmentName:
    """The rank that wrote a segment, and its first and last step."""

    rank: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """The name of the segment's file."""
        return f"rank-{self.rank:05d}-{self.first:012d}-to-{self.last:012d}.redo"


def parse_redo_name(name: str) -> RedoSegmentName | None:
    """Return what the name of a segment's file says, or None when no segment has such a name."""
    match = _NAME.fullmatch(name)
    found = RedoSegmentName(*map(int, match.groups())) if match else None
    return found if found is not None and found.first <= found.last else None


def is_redo_segment(name: str) -> bool:
    """Return whether a published segment can have this name."""
    return parse_redo_name(name) is not None


def redo_segments(paths: HistoryPaths, run: str) -> list[RedoSegmentName]:
    """Return the published segments of a run, ascending by rank and step; only the folder is read."""
    folder = paths.redo_dir(run)
    names = (path.name for path in folder.iterdir()) if is_real_folder(folder) else ()
    return sorted(filter(None, map(parse_redo_name, names)))
