"""The fragments of logical tensors: which of them one rank reads, and which elements they hold.

    extents of a checkpoint  ->  choose: every tensor's fragments, in order, for one rank  ->  parts_of: a range of them

Every reader decides here: verification, the index, the explorer and a restore. Resharding needs nothing else: the
fragments of a tensor, whatever world size or ZeRO stage wrote them, hold the range of elements that is wanted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from catalog.errors import CorruptError, FormatError
from catalog.format.manifest import NOT_STATE
from catalog.records import Extent

__all__ = ["Part", "RankFragments", "StoredTensor", "choose", "elements_held", "parts_of", "rank_of", "stored_tensors"]


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `[skip, skip + numel)` of `extent`, which are `[at, at + numel)` of the range that was asked for."""

    extent: Extent
    skip: int
    numel: int
    at: int


@dataclass(frozen=True, slots=True)
class RankFragments:
    """A checkpoint's extents by (kind, name), as one rank reads them; each list is in order of `start`."""

    by_key: Mapping[tuple[str, str], Sequence[Extent]]
    aliases: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=dict)

    def get(self, kind: str, name: str) -> Sequence[Extent]:
        """Return the extents of a tensor under any of its names; empty when the checkpoint does not have it."""
        key = (kind, name)
        return self.by_key.get(key) or self.by_key.get(self.aliases.get(key, key), ())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One logical tensor. Its `fragments` are in order and hold every element exactly once.

    A rank_local tensor has one copy per rank, `copies` in all; the fragments are those of rank 0's copy.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    fragments: tuple[Extent, ...]
    copies: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(fragment.nbytes for fragment in self.fragments)

    def same_bytes(self, other: "StoredTensor") -> bool:
        """True only if both are known, without reading, to be equal bit for bit: same dtype, shape, cuts, checksums."""
        return (self.dtype, self.shape) == (other.dtype, other.shape) and [
            (f.start, f.numel, f.checksum) for f in self.fragments
        ] == [(f.start, f.numel, f.checksum) for f in other.fragments]


def rank_of(extent: Extent) -> int:
    """Return the rank that wrote an extent, by its file's name `rank-NNNNN.safetensors`."""
    return int(extent.file.rsplit("/", 1)[-1].removeprefix("rank-").split(".", 1)[0])


def choose(extents: Iterable[Extent], *, rank: int) -> RankFragments:
    """Return the fragments that `rank` reads: all partitioned and replicated ones, and of rank_local ones its own.

    A rank that the checkpoint's world did not have reads the rank_local fragments of the lowest rank that has any.
    """
    by_key: dict[tuple[str, str], list[Extent]] = {}
    for extent in extents:
        by_key.setdefault((extent.kind, extent.name), []).append(extent)
    aliases = {}
    for (kind, name), members in by_key.items():
        if members[0].placement == "rank_local":
            owners = {rank_of(extent) for extent in members}
            wanted = rank if rank in owners else min(owners)
            members[:] = [extent for extent in members if rank_of(extent) == wanted]
        members.sort(key=lambda extent: (extent.start, extent.numel))
        aliases.update({(kind, alias): (kind, name) for extent in members for alias in extent.aliases})
    return RankFragments(by_key, aliases)


def elements_held(fragments: Sequence[Extent], *, where: str) -> int:
    """Return how many elements of their tensor the fragments, given in order of `start`, hold.

    FormatError, which begins with `where`, when they disagree about dtype, shape or placement, or overlap. Since no
    element counts twice, the fragments are complete exactly when the result is the tensor's number of elements.
    """
    first, end, held = fragments[0], 0, 0
    for extent in fragments:
        if (extent.dtype, extent.shape, extent.placement) != (first.dtype, first.shape, first.placement):
            raise FormatError(
                f"{where}: field shape of {first.kind}/{first.name}: fragments disagree: {first.dtype} "
                f"{list(first.shape)} {first.placement} and {extent.dtype} {list(extent.shape)} {extent.placement}"
            )
        if extent.start < end:
            raise FormatError(
                f"{where}: field start of {first.kind}/{first.name}: the fragment at {extent.start} overlaps the one "
                f"before it, which ends at {end}"
            )
        end = extent.start + extent.numel
        held += extent.numel
    return held


def parts_of(fragments: Sequence[Extent], *, start: int, numel: int) -> list[Part]:
    """Return the parts of the fragments that hold elements `[start, start + numel)` of their tensor, in order.

    The fragments must have passed `elements_held`. The range is stored completely exactly when the parts have `numel`
    elements together.
    """
    parts = []
    for extent in fragments:
        first = max(start, extent.start)
        last = min(start + numel, extent.start + extent.numel)
        if first < last:
            parts.append(Part(extent, first - extent.start, last - first, first - start))
    return parts


def stored_tensors(extents: Iterable[Extent]) -> dict[tuple[str, str], StoredTensor]:
    """Return the tensors among the extents by (kind, name), as rank 0 reads them; other kinds are left out.

    FormatError when fragments overlap or disagree, CorruptError when they do not hold all elements.
    """
    tensors = [extent for extent in extents if extent.kind not in NOT_STATE]
    owners: dict[tuple[str, str], set[int]] = {}
    for extent in tensors:
        owner = rank_of(extent) if extent.placement == "rank_local" else 0
        owners.setdefault((extent.kind, extent.name), set()).add(owner)
    chosen = choose(tensors, rank=0).by_key
    return {key: _stored(fragments, copies=len(owners[key])) for key, fragments in chosen.items()}


def _stored(fragments: Sequence[Extent], *, copies: int) -> StoredTensor:
    first = fragments[0]
    held = elements_held(fragments, where=first.file)
    if held != prod(first.shape):
        raise CorruptError(
            f"{first.file}: {first.kind}/{first.name}: the fragments hold {held} of {prod(first.shape)} elements"
        )
    return StoredTensor(first.name, first.kind, first.dtype, first.shape, first.aliases, tuple(fragments), copies)
