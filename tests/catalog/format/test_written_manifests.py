"""The manifests that a process has written need not be decoded again, and are not trusted more than their files."""

import os
import signal
from dataclasses import fields
from pathlib import Path

import pytest
from catalog_helpers import Piece, Run, flip_bit, pieces_of

from catalog.errors import CorruptError
from catalog.format.manifest import Manifest, decode_manifest
from catalog.format.written_manifests import _WrittenManifests, written_manifests
from catalog.history import History
from catalog.read import checkpoint as reading
from catalog.read.checkpoint import read_checkpoint
from catalog.verify import verify


def _no_decoding(data: bytes, *, path: Path) -> Manifest:
    raise AssertionError(f"{path} was decoded")


def test_a_written_manifest_has_the_rows_of_its_file(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = [
        Piece("w", bytes(8 * [rank]), dtype="F32", shape=(2, 2), start=2 * rank, placement="partitioned")
        for rank in (0, 1)
    ]
    with Run(history, world_size=2) as run:
        run.checkpoint(3, [halves[0], Piece("rng", b"{}", kind="object")], [halves[1]], register=False)
        paths = run.writers[0].paths
        with monkeypatch.context() as patched:
            patched.setattr(reading, "decode_manifest", _no_decoding)
            written = read_checkpoint(paths, "run-a", 3).manifests
    for rank, manifest in enumerate(written):
        path = paths.manifest("run-a", 3, rank)
        decoded = decode_manifest(path.read_bytes(), path=path)
        assert manifest.table.equals(decoded.table, check_metadata=True)
        assert all(
            getattr(manifest, one.name) == getattr(decoded, one.name) for one in fields(Manifest) if one.name != "table"
        )


def test_a_damaged_manifest_is_found_by_the_process_that_has_written_it(history: Path) -> None:
    with Run(history) as run:
        run.checkpoint(3, pieces_of({"w": b"abcd"}), register=False)
        path = run.writers[0].paths.manifest("run-a", 3, 0)
        flip_bit(path, offset=40)
        with pytest.raises(CorruptError, match="manifest_checksum"):
            read_checkpoint(run.writers[0].paths, "run-a", 3)
    assert [str(path) in str(problem) for problem in verify(History.open(history))] == [True]


def test_only_the_last_ones_are_kept(history: Path) -> None:
    with Run(history) as run:
        for step in range(1, 5):
            run.checkpoint(step, pieces_of({"w": b"abcd"}), register=False)
        found = [read_checkpoint(run.writers[0].paths, "run-a", step).manifests[0] for step in range(1, 5)]
    kept = _WrittenManifests(limit_bytes=2 * (found[0].table.nbytes + 20_000))
    for manifest in found:
        kept.add(bytes([manifest.step]), manifest)
    steps = [None if one is None else one.step for one in (kept.get(bytes([step])) for step in range(1, 5))]
    assert steps == [None, None, 3, 4]


def test_a_forked_child_waits_for_no_thread_of_its_parent(history: Path) -> None:
    with Run(history) as run:
        run.checkpoint(3, pieces_of({"w": b"abcd"}), register=False)
        with written_manifests._lock:
            child = os.fork()
            if not child:
                # What waits for the lock ends after all.
                signal.alarm(20)
                try:
                    (manifest,) = read_checkpoint(run.writers[0].paths, "run-a", 3).manifests
                    os._exit(0 if manifest.step == 3 else 1)
                finally:
                    os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
