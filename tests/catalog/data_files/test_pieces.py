"""Pieces that are rounded come from wherever their numbers are: memory that the same call fills, or the disk."""

import os
import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import native
from catalog.data_files import stored_bytes
from catalog.data_files.pieces import Piece, piece_of
from catalog.data_files.stored_bytes import ReadBuffer
from catalog.records import Extent

NUMEL, BEGIN = 1000, 4096
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


@pytest.fixture
def numbers(tmp_path: Path) -> torch.Tensor:
    """Return the numbers in a data file, from BEGIN on."""
    found = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    (tmp_path / "a").write_bytes(bytes(BEGIN) + found.numpy().tobytes())
    return found


def weight(dtype: str, *, skip: int, numel: int) -> Extent:
    """Return the extent of some of the numbers, rounded."""
    place = "a", BEGIN + 4 * skip, 2 * numel
    return Extent("w", "model", dtype, (numel,), 0, numel, *place, bytes(16), "replicated", (), "rounded", "F32")


@pytest.mark.parametrize(("dtype", "beside", "scratch"), [*product(DTYPES, (False, True), (16 << 20, 64, 68))])
def test_any_part_of_what_is_rounded_can_be_read(tmp_path, numbers, monkeypatch, dtype, beside, scratch):
    monkeypatch.setattr(stored_bytes, "_SCRATCH_BYTES", scratch)
    for skip, first, numel in ((0, 0, NUMEL), (0, 0, 1), (3, 5, 700), (NUMEL - 1, 0, 1), (10, 989, 1)):
        extent = weight(dtype, skip=skip, numel=NUMEL - skip)
        wanted = [piece_of(extent, skip_bytes=2 * first, nbytes=2 * numel), Piece("a", 0, 7)]
        if beside:
            wanted += [Piece("a", BEGIN, 4 * NUMEL)]
        (found, head, *_), checksums = ReadBuffer().read(tmp_path, wanted)
        expected = numbers[skip + first : skip + first + numel].to(DTYPES[dtype]).view(torch.uint8).numpy()
        assert np.array_equal(found, expected), (skip, first, numel)
        assert checksums[:32] == native.checksum(expected) + native.checksum(head)


def test_numbers_that_another_piece_has_only_in_part_are_read(tmp_path, numbers):
    pieces = [Piece("a", BEGIN, 40), Piece("a", BEGIN + 20, 20, "BF16"), Piece("a", BEGIN + 8, 4, "BF16")]
    (_, over, inside), _ = ReadBuffer().read(tmp_path, pieces, checksums=False)
    assert over.tobytes() == numbers[5:15].bfloat16().view(torch.uint8).numpy().tobytes()
    assert inside.tobytes() == numbers[2:4].bfloat16().view(torch.uint8).numpy().tobytes()


def test_numbers_are_rounded_while_the_next_ones_are_read(tmp_path, numbers, monkeypatch):
    monkeypatch.setattr(stored_bytes, "_SCRATCH_BYTES", 2000)
    next_read, reads = threading.Event(), []

    def read(*files, real=native.read, **requests):
        reads.extend(requests["nbytes"])
        if len(reads) > 1:
            next_read.set()
        return real(*files, **requests)

    def rounded(*, real=native.round_memory, **where):
        assert next_read.wait(10), "nothing was read while numbers were rounded"
        real(**where)

    monkeypatch.setattr(native, "read", read)
    monkeypatch.setattr(native, "round_memory", rounded)
    ((found,), _) = ReadBuffer().read(tmp_path, [piece_of(weight("BF16", skip=0, numel=NUMEL))])
    assert np.array_equal(found, numbers.bfloat16().view(torch.uint8).numpy())


def test_several_threads_round_what_is_in_memory(tmp_path, numbers, monkeypatch):
    monkeypatch.setattr(stored_bytes, "_ROUNDED_BYTES", 2000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    both = threading.Barrier(2)

    def rounded(*, real=native.round_memory, **where):
        both.wait(10)
        real(**where)

    monkeypatch.setattr(native, "round_memory", rounded)
    pieces = [Piece("a", BEGIN, 4 * NUMEL), piece_of(weight("BF16", skip=0, numel=NUMEL))]
    (_, found), _ = ReadBuffer().read(tmp_path, pieces)
    assert np.array_equal(found, numbers.bfloat16().view(torch.uint8).numpy())
