"""The plain records that the layers exchange: the contents of manifests, markers and run facts."""

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["CHECKSUM_BYTES", "CheckpointRef", "Extent", "Marker", "MarkerPart", "Placement", "RunFacts"]

CHECKSUM_BYTES = 16
"""The size of every checksum that is stored or returned by `native`: XXH3-128."""

Placement = Literal["partitioned", "replicated", "rank_local"]


@dataclass(frozen=True, slots=True, order=True)
class CheckpointRef:
    """One checkpoint by its run and step; `str()` gives the form "run:step" that references take."""

    run: str
    step: int

    def __str__(self) -> str:
        return f"{self.run}:{self.step}"


@dataclass(frozen=True, slots=True)
class Extent:
    """One manifest row: a byte range of one file that holds one fragment of one logical tensor.

    `shape` is the logical tensor's global shape; the fragment is `[start, start + numel)` of it, flattened. `file` is
    relative to the history's root, with forward slashes. `checksum` is the canonical XXH3-128 of the stored bytes
    (CHECKSUM_BYTES long). `dtype` is a safetensors dtype, `start` and `numel` count elements, `offset` and `nbytes`
    count bytes. Extents of the kinds `header`, `pad`, `object` and `object_tensor` are no tensors of the model; the
    only alias of an `object_tensor`, if any, is its place in the object. Every byte of a data file belongs to exactly
    one extent of the codec `raw`.

    With the codec `rounded` the file has at `offset` float32 numbers (`base`), which belong to another extent: rounded
    to `dtype` they are the bytes that `nbytes` and `checksum` are about.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    numel: int
    file: str
    offset: int
    nbytes: int
    checksum: bytes
    placement: Placement
    aliases: tuple[str, ...] = ()
    codec: str = "raw"
    base: str | None = None

    @property
    def is_rounded(self) -> bool:
        """Whether its bytes are made of another extent's."""
        return self.codec == "rounded"


@dataclass(frozen=True, slots=True)
class MarkerPart:
    """One rank's part of a checkpoint, as the commit marker describes it. Sizes are in bytes, checksums in hex."""

    rank: int
    manifest: str
    manifest_checksum: str
    data: str
    data_bytes: int


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of commit.json: a pure function of the manifests of all ranks."""

    run: str
    step: int
    world_size: int
    layout_hash: str
    parts: tuple[MarkerPart, ...]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The content of run.json: the immutable facts of a run. `created` is in ISO 8601, with a time zone."""

    run: str
    created: str
    world_size: int
    parent_run: str | None
    parent_step: int | None
    layout_hash: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> str:
        """Says what its checkpoints hold where that is not all of the training's state: "weights only", or "weights
        only, rounded to bf16"; else "".
        """
        if self.facts.get("what") != "weights":
            return ""
        dtype = self.facts.get("dtype")
        return "weights only" if dtype is None else f"weights only, rounded to {dtype}"
