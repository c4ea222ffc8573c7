"""The readers that are fuzzed, each with valid inputs and ways to damage them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from damage import Chance, json_input, mutated, odd_in_places, odd_json, plain, table_input
from packed_targets import packed_targets
from small_training import train
from target import Target

import native
from capture.deepspeed_checkpoints.file import FileWrite, read_tree
from capture.deepspeed_checkpoints.tree import COMMON_CLASSES, CheckpointTree, decode_tree, encode_tree
from capture.devices.copies import CUDA
from capture.state.objects import decode_object, encode_object
from catalog.format.audit_file import read_audit
from catalog.format.fingerprints import read_fingerprints
from catalog.format.header import read_header
from catalog.format.journal import read_segment
from catalog.format.json_facts import read_history_json
from catalog.format.manifest import Manifest, decode_manifest
from catalog.format.marker import read_marker
from catalog.format.statistics_file import merged_statistics, read_statistics
from catalog.history import History
from catalog.index.ingest import run_rows
from catalog.paths import HistoryPaths
from catalog.read.checkpoint import Checkpoint
from catalog.read.runs import run_facts
from catalog.read.tensors import logical_tensors
from catalog.records import Marker

__all__ = ["targets"]


def targets(folder: Path) -> list[Target]:
    """Return every target; the inputs are the files of a small training, which is captured in `folder`."""
    root = folder / "history"
    train(root, width=2, steps=1)
    paths = HistoryPaths(root)
    run = History.open(root).runs()[0].run
    scratch = folder / "scratch"
    scratch.mkdir()

    def json_target(name: str, path: Path, read: Callable[[HistoryPaths], object]) -> Target:
        other = scratch / name
        target = other / path.relative_to(root)
        target.parent.mkdir(parents=True)
        return Target(name, 12, json_input(path.read_bytes()), _at(target, lambda: read(HistoryPaths(other))))

    def table_target(name: str, path: Path, read: Callable[[Path], object]) -> Target:
        found = pq.ParquetFile(path)
        metadata = {key.decode(): value.decode() for key, value in (found.metadata.metadata or {}).items()}
        target = scratch / path.name
        make = table_input(found.read().replace_schema_metadata(None), metadata, path.read_bytes())
        return Target(name, 10, make, _at(target, lambda: read(target)))

    header = scratch / "header.safetensors"
    manifest, journal, statistics = paths.manifest(run, 1, 0), paths.journal_dir(run), paths.statistics_dir(run)
    prints, audits = paths.fingerprints_dir(run), paths.audits_dir(run)
    return [
        Target(
            "header", 20, _header_input(paths.data(run, 1, 0).read_bytes()), _at(header, lambda: read_header(header))
        ),
        json_target("history.json", paths.history_json, read_history_json),
        json_target("run.json", paths.run_json(run), lambda other: run_rows(run_facts(other, run))),
        json_target("marker", paths.marker(run, 1), lambda other: read_marker(other, run, 1)),
        table_target("manifest", manifest, lambda path: _extents(decode_manifest(path.read_bytes(), path=path))),
        table_target("journal", min(journal.iterdir()), lambda path: read_segment(path, run=run)),
        table_target("fingerprints", min(prints.iterdir()), lambda path: list(read_fingerprints(path, run=run))),
        table_target(
            "statistics", min(statistics.iterdir()), lambda path: merged_statistics([read_statistics(path, run=run)])
        ),
        table_target("audit", min(audits.iterdir()), lambda path: read_audit(path, run=run)),
        *_object_targets(folder / "state.pt", scratch / "state.pt"),
        *packed_targets(folder),
    ]


def _object_targets(intact: Path, damaged: Path) -> list[Target]:
    """Return the targets of objects and of DeepSpeed's trees; one is written to `intact`, what became of it to
    `damaged`.
    """
    tree = encode_tree(OBJECT | {"shared": torch.ones(3)}, known=COMMON_CLASSES, pickle=False)
    tree_file = _tree_file(intact, tree)
    return [
        Target(
            "object",
            25,
            _tree_input(encode_object("o", OBJECT).json),
            lambda data: decode_object("o", data, tensor=_tensor),
        ),
        Target(
            "DeepSpeed tree",
            20,
            _tree_input(plain(tree.json)),
            lambda data: decode_tree(_loaded(data), tree.tensors, what="x", known=COMMON_CLASSES, pickle=False),
        ),
        Target(
            "DeepSpeed file",
            4,
            lambda chance: mutated(tree_file, chance),
            _at(damaged, lambda: read_tree(damaged)),
        ),
    ]


def _at(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    """Return a function that writes what it is given to `path`, and reads it."""

    def reading(data: bytes) -> object:
        path.write_bytes(data)
        return read()

    return reading


OBJECT = {
    "rng": {"torch": torch.arange(5, dtype=torch.uint8), "numpy": ("MT19937", np.arange(4), 3, 0.5)},
    "list": [1, 2.5, None, True, "text", float("nan"), b"bytes"],
    1: {"dtype": torch.bfloat16, "device": torch.device("cpu")},
    "$": (),
}


def _tensor(name: str) -> torch.Tensor:
    if name == "o/0":
        return torch.arange(5, dtype=torch.uint8)
    raise KeyError(name)


def _extents(manifest: Manifest) -> object:
    return manifest.extents(), logical_tensors(Checkpoint(_NO_MARKER, (manifest,)), where="x")


_NO_MARKER = Marker("r", 0, 1, "l", ())


def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _tree_input(seed: bytes) -> Callable[[Chance], bytes]:
    """Return inputs that are JSON trees: without a checksum of their own, and nested as deep as JSON can be."""
    content = json.loads(seed)

    def make(chance: Chance) -> bytes:
        if chance.random() < 0.3:
            return mutated(seed, chance)
        odd = odd_in_places(content, chance)
        if chance.random() < 0.01:
            depth = chance.choice((100, 400, 900, 5000))
            return b'{"a":' * depth + plain(odd) + b"}" * depth
        return plain(odd)

    return make


def _header_input(seed: bytes) -> Callable[[Chance], bytes]:
    length = int.from_bytes(seed[:8], "little")
    content = json.loads(seed[8 : 8 + length])

    def make(chance: Chance) -> bytes:
        if chance.random() < 0.5:
            return mutated(seed[: 8 + length], chance) + seed[8 + length :]
        odd = content
        for _ in range(chance.choice((1, 1, 2))):
            odd = odd_json(odd, chance)
        text = plain(odd).ljust(length)
        return len(text).to_bytes(8, "little") + text + seed[8 + length :]

    return make


def _tree_file(path: Path, tree: CheckpointTree) -> bytes:
    writer = native.Writer(backend="posix", budget_bytes=8 << 20, block_bytes=64 << 10, depth=2)
    try:
        FileWrite.start(tree, path, writer=writer, lazy_storages=frozenset(), align=4096, copies=CUDA).finish()
    finally:
        writer.close()
    return path.read_bytes()
