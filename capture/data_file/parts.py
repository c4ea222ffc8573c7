"""Describes a part: the fragment of one item that one rank writes, and its name in a data file."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from capture.devices.feed import DevicePart, FedPart
from capture.devices.rounding import RoundedPart
from capture.state.interface import TensorItem
from catalog.format.header import Entry
from catalog.records import Extent

__all__ = ["HUGE", "Part", "can_be_referenced", "entry_key", "entry_shape", "widest_entry"]

HUGE = 1 << 50
"""This offset has more digits than any real one."""

_LEAST_REFERENCED_BYTES = 512
"""A smaller part is not referred to: its row and its entry would take as much."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Stands for the elements `[start, start + numel)` of a logical tensor, which this rank writes: they are read from
    `address`, or fed from `device`, or `rounded` on their way. Where it is `live`, the training's own memory is read
    after the step too, until the barrier. `itemsize` and `dtype` are those of the file.
    """

    item: TensorItem
    start: int
    numel: int
    address: int
    itemsize: int
    dtype: str
    live: bool
    device: DevicePart | None = None
    rounded: RoundedPart | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def fed(self) -> FedPart | None:
        """The feeder that gives the writer the bytes, where it does not read them from memory itself."""
        return self.device or self.rounded

    @property
    def bytes_in_host(self) -> int:
        """The length of its memory from `address` on; 0 for memory of a device."""
        if self.device is not None:
            return 0
        return self.nbytes if self.rounded is None else self.rounded.live_bytes

    @property
    def key(self) -> str:
        return entry_key(self.item.kind, self.item.name, self.item.shape, self.start, self.numel)

    def row(self, *, file: str, offset: int, checksum: bytes) -> Extent:
        """Return its manifest row where its bytes are stored at `offset` of `file`, as they are."""
        return Extent(
            name=self.item.name,
            kind=self.item.kind,
            dtype=self.dtype,
            shape=self.item.shape,
            start=self.start,
            numel=self.numel,
            file=file,
            offset=offset,
            nbytes=self.nbytes,
            checksum=checksum,
            placement=self.item.placement,
            aliases=self.item.aliases,
        )


def entry_key(kind: str, name: str, shape: Sequence[int], start: int, numel: int) -> str:
    """Return the safetensors key of a fragment: `kind/name`, with its range unless it is the whole tensor."""
    whole = start == 0 and numel == prod(shape)
    return f"{kind}/{name}" if whole else f"{kind}/{name}[{start}:{start + numel}]"


def entry_shape(part: Part) -> tuple[int, ...]:
    """Return the shape of a part's entry: the tensor's, or flat for a fragment of it."""
    whole = part.start == 0 and part.numel == prod(part.item.shape)
    return tuple(part.item.shape) if whole else (part.numel,)


def widest_entry(part: Part) -> Entry:
    """Return an entry at least as long as any that this part can have in a header."""
    return Entry(part.key, part.dtype, entry_shape(part), HUGE, HUGE)


def can_be_referenced(part: Part) -> bool:
    """Return whether an earlier checkpoint's bytes may stand for this part: the host, or the device, can check that
    they are the same, and a manifest row costs less than they do.
    """
    if not part.live or part.nbytes < _LEAST_REFERENCED_BYTES:
        return False
    return part.device is None or part.device.memory() is not None
