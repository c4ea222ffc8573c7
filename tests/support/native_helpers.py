"""Random files for the native core: extents with their memory, and the bytes that must be in the file."""

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

import native

ALIGN = 4096
MIB = 1 << 20
BLOCK = 64 << 10
SMALL_SLOTS = 4 * (64 << 10)
LEAST_BUDGET = 2 * BLOCK + SMALL_SLOTS
HEADER = bytes(range(256)) * (ALIGN // 256)


each_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("io_uring", marks=pytest.mark.skipif(native.probe_io_uring() != "", reason="no io_uring here")),
        "posix",
    ],
)


def new_writer(
    backend: str, *, budget_bytes: int = LEAST_BUDGET, block_bytes: int = BLOCK, depth: int = 4, **faults: int
) -> native.Writer:
    return native.Writer(
        backend=backend,
        budget_bytes=budget_bytes,
        block_bytes=block_bytes,
        depth=depth,
        faults=native.Faults(**faults) if faults else None,
    )


def arena(nbytes: int) -> np.ndarray:
    """Return page-aligned memory filled with zeros."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8)


def memory_to_unmap() -> mmap.mmap:
    """Return memory to close, so large that what the process maps afterwards does not come to lie at its beginning."""
    return mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def fill(memory: np.ndarray, seed: int) -> None:
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, dtype=np.uint8)


@dataclass(frozen=True)
class Piece:
    """One future extent: it begins `gap` bytes after the previous one.

    `place` gives the position of its bytes in memory: "next" is behind the previous piece, as in the file; "congruent"
    is congruent to the file offset; "odd" is anywhere.
    """

    nbytes: int
    gap: int
    place: str
    eager: bool


@dataclass(frozen=True)
class Extents:
    """Extents as columns over one arena, which must outlive every address."""

    memory: np.ndarray
    offsets: np.ndarray
    positions: np.ndarray  # in the arena
    nbytes: np.ndarray
    eager: np.ndarray
    data_end: int

    @property
    def addresses(self) -> np.ndarray:
        return self.positions + np.uint64(self.memory.ctypes.data)

    def plan(self) -> native.WritePlan:
        return native.WritePlan(
            offsets=self.offsets,
            addresses=self.addresses,
            nbytes=self.nbytes,
            eager=self.eager,
            data_start=ALIGN,
            data_end=self.data_end,
            align=ALIGN,
        )

    def bytes_of(self, index: int) -> bytes:
        at = int(self.positions[index])
        return self.memory[at : at + int(self.nbytes[index])].tobytes()

    def contents(self) -> list[bytes]:
        return [self.bytes_of(i) for i in range(len(self.offsets))]

    def image(self) -> bytes:
        """Return the bytes that the range [ALIGN, data_end) of the file must have, with zeros in gaps."""
        image = bytearray(self.data_end - ALIGN)
        for offset, content in zip(self.offsets.tolist(), self.contents(), strict=True):
            image[offset - ALIGN : offset - ALIGN + len(content)] = content
        return bytes(image)


def extents(pieces: list[Piece], *, seed: int = 0) -> Extents:
    offsets, positions = [], []
    offset, position = ALIGN, 0
    for piece in pieces:
        offset += piece.gap
        position += piece.gap
        if piece.place == "congruent":
            position += (offset - position) % ALIGN
        elif piece.place == "odd":
            position += ALIGN + 13
        offsets.append(offset)
        positions.append(position)
        offset += piece.nbytes
        position += piece.nbytes
    memory = arena(position)
    fill(memory, seed)
    return Extents(
        memory,
        np.array(offsets, dtype=np.uint64),
        np.array(positions, dtype=np.uint64),
        np.array([piece.nbytes for piece in pieces], dtype=np.uint64),
        np.array([piece.eager for piece in pieces], dtype=np.uint8),
        -(-offset // ALIGN) * ALIGN,
    )


SIZES = st.one_of(
    st.just(0),
    st.integers(1, 200),
    st.integers(1, 40_000),
    st.sampled_from([4096, 65536, 65537, 1 << 20]),
    st.integers(1_000_000, 2_500_000),
)
GAPS = st.one_of(st.just(0), st.just(0), st.integers(1, 100), st.integers(1, 20_000))
PLACES = st.sampled_from(["next", "congruent", "odd"])


@st.composite
def pieces(draw: st.DrawFn, *, most: int = 8) -> list[Piece]:
    count = draw(st.integers(0, most))
    eager = draw(st.integers(0, count))
    return [Piece(draw(SIZES), draw(GAPS), draw(PLACES), i < eager) for i in range(count)]


def lazy_run(nbytes: int, *, seed: int = 0, place: str = "congruent") -> Extents:
    """Return one lazy extent, by default one that is written straight from memory."""
    return extents([Piece(nbytes, 0, place, False)], seed=seed)


def check_file(path: Path, data: Extents, *, header: bytes = HEADER, trailer: bytes = b"") -> None:
    """Fail unless the file is header, image, trailer."""
    content = path.read_bytes()
    assert content[:ALIGN] == header
    assert len(content) == data.data_end + len(trailer)
    assert content[data.data_end :] == trailer
    same_bytes(content[ALIGN : data.data_end], data.image())


def same_bytes(got: bytes, want: bytes) -> None:
    """Assert that both are equal; the message gives the first difference without printing megabytes."""
    assert len(got) == len(want)
    if got != want:
        apart = np.flatnonzero(np.frombuffer(got, np.uint8) != np.frombuffer(want, np.uint8))
        raise AssertionError(f"{apart.size} of {len(got)} bytes differ, the first at {apart[0]}")
