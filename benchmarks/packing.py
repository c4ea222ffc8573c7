"""What a step of a training takes when it is packed, and how fast that is, against zstd, ZipNN, and zstd on the XOR.

Small GPTs in bfloat16 with float32 masters and AdamW train from scratch, fine-tune and fine-tune adapters. A state is
packed alone, or against the one some steps before it. *Weights* and *state* are bytes for each parameter of the model
and step, the second with masters and moments; raw they are 2 and 14. With adapters they are those of the adapters, for
frozen layers are stored once. *Of the weights* is the first as a share of the raw weights. Speeds are raw bytes of the
state by the processor time of one thread. All pack blocks of at most a MiB; zstd has level 3.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import zstandard

from benchmarks.measure import Rows, Series, rotations
from benchmarks.packed_states import DISTANCES, Kept, trainings
from benchmarks.peers import UnavailableError
from benchmarks.zipnn_peer import ZipNN
from catalog.compaction.spans import BLOCK_BYTES
from catalog.encoding.planes import packed, unpacked

COLUMNS = {"weights": "B", "state": "B", "of the weights": "%", "encode": "MB/s", "decode": "MB/s"}


class Codec(Protocol):
    """One way to pack the bytes of a tensor, alone or against those of a base."""

    name: str

    def encode(self, raw: bytes, base: bytes | None, itemsize: int) -> bytes: ...
    def decode(self, content: bytes, base: bytes | None, nbytes: int) -> bytes: ...


class Ours:
    name = "DSHistory"

    def encode(self, raw: bytes, base: bytes | None, itemsize: int) -> bytes:
        return packed(memoryview(raw), itemsize=itemsize, base=None if base is None else memoryview(base))

    def decode(self, content: bytes, base: bytes | None, nbytes: int) -> bytes:
        into = bytearray(nbytes)
        unpacked(content, base=None if base is None else memoryview(base), into=memoryview(into))
        return bytes(into)


class Zstd:
    name = "zstd"

    def encode(self, raw: bytes, base: bytes | None, itemsize: int) -> bytes:
        return zstandard.ZstdCompressor(level=3).compress(raw if base is None else _xor(raw, base))

    def decode(self, content: bytes, base: bytes | None, nbytes: int) -> bytes:
        found = zstandard.ZstdDecompressor().decompress(content)
        return found if base is None else _xor(found, base)


class _Turn(NamedTuple):
    """A state to pack, its base, and who packs it."""

    training: Kept
    distance: int | None
    codec: Codec

    @property
    def name(self) -> str:
        against = "alone" if self.distance is None else f"{self.distance} apart"
        what = "zstd on the XOR" if isinstance(self.codec, Zstd) and self.distance else self.codec.name
        return f"{self.training.name}, {against}, {what}"


def run(scratch: Path, *, layers: int, width: int, steps: int, times: int) -> tuple[Rows, dict[str, object]]:
    """Pack every state in `times` rotations; each is unpacked again and compared."""
    skipped = {}
    codecs: list[Codec] = [Ours(), Zstd()]
    alone = list(codecs)
    try:
        alone.append(ZipNN())
    except UnavailableError as error:
        skipped[ZipNN.name] = str(error)
    turns = [
        _Turn(training, distance, codec)
        for training in trainings(layers=layers, width=width, steps=steps)
        for distance in (None, *DISTANCES)
        for codec in (alone if distance is None else codecs)
    ]
    rows: Rows = {turn.name: defaultdict(Series) for turn in turns}
    for turn in rotations(turns, times=times):
        for figure, value in _figures(turn).items():
            rows[turn.name][figure].add(value)
    parameters = {turn.training.name: turn.training.parameters for turn in turns}
    return rows, {"parameters": parameters, "steps": steps, "rotations": times, "skipped": skipped}


def _figures(turn: _Turn) -> dict[str, float]:
    base = None if turn.distance is None else turn.training.at[0]
    state = turn.training.at[turn.distance or 0]
    taken: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for kind, tensors in state.items():
        for number, (itemsize, raw) in enumerate(tensors):
            other = None if base is None else base[kind][number][1]
            taken[kind] += _packed_bytes(turn.codec, raw, other, itemsize, seconds)
    raw_bytes = {kind: sum(len(raw) for _, raw in tensors) for kind, tensors in state.items()}
    parameters = turn.training.parameters
    return {
        "weights": taken["weights"] / parameters,
        "state": sum(taken.values()) / parameters,
        "of the weights": taken["weights"] / raw_bytes["weights"],
        "encode": sum(raw_bytes.values()) / seconds["encode"],
        "decode": sum(raw_bytes.values()) / seconds["decode"],
    }


def _packed_bytes(codec: Codec, raw: bytes, base: bytes | None, itemsize: int, seconds: dict[str, float]) -> int:
    """Return how many bytes a tensor takes; add up the processor time."""
    total = 0
    for begin in range(0, len(raw), BLOCK_BYTES):
        block = raw[begin : begin + BLOCK_BYTES]
        other = None if base is None else base[begin : begin + BLOCK_BYTES]
        content = _timed(seconds, "encode", codec.encode, block, other, itemsize)
        again = _timed(seconds, "decode", codec.decode, content, other, len(block))
        if again != block:
            raise RuntimeError(f"{codec.name} gives other bytes")
        total += len(content)
    return total


def _timed(
    seconds: dict[str, float], what: str, code: Callable[[bytes, bytes | None, int], bytes], *given: Any
) -> bytes:
    began = time.thread_time()
    found = code(*given)
    seconds[what] += time.thread_time() - began
    return found


def _xor(a: bytes, b: bytes) -> bytes:
    return np.bitwise_xor(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)).tobytes()
