"""Tiny valid checkpoints without torch, written from bytes with the catalog's own writer."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest

import native
from catalog.format.dtypes import DTYPES
from catalog.format.extents import extent_table
from catalog.format.header import Entry, encode_header, entries_json, header_bytes_needed
from catalog.paths import data_file
from catalog.records import Extent, Placement, RunFacts
from catalog.run_writer import RunWriter, create_history, create_run

ALIGN = 4096
LAYOUT = "layout-1"


@dataclass(frozen=True)
class Piece:
    """One fragment, as a rank writes it."""

    name: str
    data: bytes
    kind: str = "model"
    dtype: str = "U8"
    shape: tuple[int, ...] | None = None
    start: int = 0
    placement: Placement = "replicated"
    aliases: tuple[str, ...] = ()


def pieces_of(tensors: Mapping[str, bytes], *, kind: str = "model") -> list[Piece]:
    """Return each value as a whole U8 tensor."""
    return [Piece(name, data, kind) for name, data in tensors.items()]


def data_file_bytes(
    pieces: Iterable[Piece], *, run: str = "run-a", step: int = 0, rank: int = 0
) -> tuple[bytes, list[Extent]]:
    """Return a data file with header, pieces and padding to the aligned end, and its manifest rows."""
    file = data_file(run, step, rank)
    padded = [*pieces]
    body_bytes = sum(len(piece.data) for piece in padded)
    padded.append(Piece("__pad__.tail", bytes(-body_bytes % ALIGN), "pad", placement="rank_local"))
    entries, body = [], bytearray()
    for piece in padded:
        entries.append(_entry(piece, at=len(body)))
        body += piece.data
    metadata = {"format": "dshistory-1", "run": run, "step": str(step), "rank": str(rank)}
    needed = header_bytes_needed(entries, metadata=metadata)
    header = encode_header([entries_json(entries)], metadata=metadata, data_start=needed + -needed % ALIGN)
    top = _extent(Piece("__header__", header, "header", placement="rank_local"), file=file, offset=0)
    rows = [
        _extent(piece, file=file, offset=len(header) + entry.begin)
        for piece, entry in zip(padded, entries, strict=True)
    ]
    return header + bytes(body), [top, *rows]


def _entry(piece: Piece, *, at: int) -> Entry:
    shape, numel = _shape(piece)
    whole = prod(shape) == numel
    key = piece.name if piece.kind == "pad" else f"{piece.kind}/{piece.name}"
    key += "" if whole else f"[{piece.start}:{piece.start + numel}]"
    return Entry(key, piece.dtype, shape if whole else (numel,), at, at + len(piece.data))


def _shape(piece: Piece) -> tuple[tuple[int, ...], int]:
    """Return the shape of the logical tensor and the number of elements of this piece."""
    numel = len(piece.data) // DTYPES[piece.dtype]
    return (numel,) if piece.shape is None else piece.shape, numel


def _extent(piece: Piece, *, file: str, offset: int) -> Extent:
    shape, numel = _shape(piece)
    return Extent(
        name=piece.name,
        kind=piece.kind,
        dtype=piece.dtype,
        shape=shape,
        start=piece.start,
        numel=numel,
        file=file,
        offset=offset,
        nbytes=len(piece.data),
        checksum=native.checksum(piece.data),
        placement=piece.placement,
        aliases=piece.aliases,
    )


@dataclass
class Run:
    """One run of a history; this process writes all its ranks."""

    root: Path
    run: str = "run-a"
    world_size: int = 1
    parent: tuple[str, int] | None = None
    created: str = "2026-11-21T10:15:02+00:00"
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        create_history(self.root)
        run, step = self.parent or (None, None)
        create_run(self.root, RunFacts(self.run, self.created, self.world_size, run, step, LAYOUT, dict(self.facts)))
        self.writers = [
            RunWriter(self.root, run=self.run, rank=rank, world_size=self.world_size, layout_hash=LAYOUT)
            for rank in range(self.world_size)
        ]

    def part(self, step: int, rank: int, pieces: Iterable[Piece]) -> None:
        """Publish one rank's part, which alone is not a checkpoint."""
        writer = self.writers[rank]
        content, extents = data_file_bytes(pieces, run=self.run, step=step, rank=rank)
        data_tmp = writer.begin(step)
        data_tmp.write_bytes(content)
        writer.publish_part(step, data_tmp=data_tmp, extents=extent_table(extents))

    def checkpoint(self, step: int, *ranks: Sequence[Piece], register: bool = True, **metrics: float) -> None:
        """Commit a step with the pieces of every rank."""
        for name, value in metrics.items():
            self.writers[0].journal.metric(step, name, value)
        for rank, pieces in enumerate(ranks):
            self.part(step, rank, pieces)
        assert self.writers[0].try_commit(step)
        self.writers[0].journal.flush()
        if register:
            self.register(patience_s=10.0)

    def register(self, *, patience_s: float = 0.1) -> int:
        """Bring the index up to date; the number of checkpoints that were missing in it."""
        # DuckDB is imported only where it is needed: some processes of the tests only write.
        from catalog.index import index

        return index.register(self.writers[0].paths, patience_s=patience_s)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def can_be_direct(folder: Path) -> bool:
    """Return whether files in a folder can be written past the page cache."""
    tried = folder / "tried"
    try:
        os.close(os.open(tried, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    finally:
        tried.unlink(missing_ok=True)
    return True


def sizes_written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the size of each `os.write` is added from now on."""
    sizes: list[int] = []
    write = os.write

    def noted(descriptor: int, data: memoryview) -> int:
        sizes.append(write(descriptor, data))
        return sizes[-1]

    monkeypatch.setattr(os, "write", noted)
    return sizes


def meanwhile(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, happens: Callable[[], object]) -> list[str]:
    """Let something happen before a function of a module does its work for the first time. Return a list that then has
    its name."""
    function = getattr(module, name)
    happened: list[str] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        if not happened:
            happened.append(name)
            happens()
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, called)
    return happened


def flip_bit(path: Path, *, offset: int, bit: int = 0) -> None:
    """Damage one bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)
