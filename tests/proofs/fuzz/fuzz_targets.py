"""The readers that are fuzzed, each with valid inputs and ways to damage them.

A byte mutation alone seldom passes a checksum. So the bytes of a file are also changed with its checksum made right
again, values inside JSON and cells of tables are replaced by odd ones, and the result is encoded as the writer would.
"""

import json
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from byte_flips import train

import native
from capture.deepspeed_checkpoints.file import FileWrite, read_tree
from capture.deepspeed_checkpoints.tree import COMMON_CLASSES, CheckpointTree, decode_tree, encode_tree
from capture.devices.copies import CUDA
from capture.state.objects import decode_object, encode_object
from catalog.disk import json_file
from catalog.disk.checked_parquet import encode_checked
from catalog.format.fingerprints import read_fingerprints
from catalog.format.header import read_header
from catalog.format.journal import read_segment
from catalog.format.json_facts import read_history_json, read_run_facts
from catalog.format.manifest import Manifest, decode_manifest
from catalog.format.marker import read_marker
from catalog.format.statistics_file import merged_statistics, read_statistics
from catalog.history import History
from catalog.index.ingest import run_rows
from catalog.paths import HistoryPaths
from catalog.read.checkpoint import Checkpoint
from catalog.read.tensors import logical_tensors
from catalog.records import Marker

__all__ = ["Target", "targets"]

Chance = random.Random

ODD_NUMBERS = (0, -1, 1, 2, 7, 64, 255, 4096, 2**31 - 1, 2**31, 2**32, 2**53, 2**56, 2**62, 2**63 - 1, -(2**63), 10**40)
ODD_VALUES = (
    *ODD_NUMBERS, None, True, False, 0.5, -0.0, 1e308, "", "\0", "a" * 300, "../../x", "\ud800", "1", "F32", "$",
    [], {}, [[]], [0], [-1], [1, 2], {"": None}, {"$": "tuple"}, {"$": "tensor"}, {"$": "float", "hex": "x"},
)  # fmt: skip
MAX_DATA = 64 << 10


@dataclass(frozen=True, slots=True)
class Target:
    """One reader: `read` takes a damaged input, `make` makes one by chance."""

    name: str
    weight: int
    make: Callable[[Chance], bytes]
    read: Callable[[bytes], object]


def mutated(data: bytes, chance: Chance) -> bytes:
    """Return the bytes with a few random changes."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 8))):
        at = chance.randrange(len(out) + 1)
        size = chance.choice((1, 1, 2, 4, 8, 16, chance.randrange(1, 256)))
        kind = chance.randrange(8)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            out[at : at + 1] = bytes([chance.choice((0, 1, 34, 44, 91, 93, 123, 125, 127, 128, 255))])
        elif kind == 2:
            out[at : at + size] = chance.randbytes(size)
        elif kind == 3:
            del out[at : at + size]
        elif kind == 4:
            out[at:at] = out[at : at + size] * chance.choice((1, 2, 30))
        elif kind == 5:
            number = chance.choice(ODD_NUMBERS) % 2**64
            out[at : at + 8] = struct.pack("<Q", number)
        elif kind == 6:
            number = chance.choice(ODD_NUMBERS) % 2**32
            out[at : at + 4] = struct.pack("<I", number)
        else:
            other = chance.randrange(len(out) + 1)
            out[at : at + size] = out[other : other + size]
    return bytes(out[:MAX_DATA])


def odd_json(value: Any, chance: Chance) -> Any:
    """Return a copy of a JSON value in which one value, or a key, is another one."""
    if not isinstance(value, (dict, list)) or not value or chance.random() < 0.15:
        if chance.random() < 0.05:
            return json.loads("[" * 50 + "]" * 50)
        return chance.choice(ODD_VALUES)
    if isinstance(value, list):
        index = chance.randrange(len(value))
        changed = list(value)
        kind = chance.random()
        if kind < 0.1:
            del changed[index]
        elif kind < 0.2:
            changed.insert(index, changed[index])
        else:
            changed[index] = odd_json(value[index], chance)
        return changed
    key = chance.choice(list(value))
    changed = dict(value)
    kind = chance.random()
    if kind < 0.1:
        del changed[key]
    elif kind < 0.2:
        changed[str(chance.choice(ODD_VALUES))] = changed[key]
    else:
        changed[key] = odd_json(value[key], chance)
    return changed


def _plain(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=True).encode()


def _json_input(seed: bytes) -> Callable[[Chance], bytes]:
    content = json.loads(seed)
    content.pop("checksum", None)

    def make(chance: Chance) -> bytes:
        if chance.random() < 0.2:
            return mutated(seed, chance)
        odd = content
        for _ in range(chance.choice((1, 1, 2, 3))):
            odd = odd_json(odd, chance)
        try:
            return json_file.encode(odd) if isinstance(odd, dict) else _plain(odd)
        except (ValueError, UnicodeEncodeError):
            return _plain(odd)

    return make


def _right_checksum(data: bytes) -> bytes:
    """Return a checked Parquet file with the checksum of its bytes, where it still has a footer."""
    at = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    if not 20 <= at < len(data):
        return data
    return data[: at - 16] + native.checksum(data[: at - 16] + data[at:]) + data[at:]


def _table_input(table: pa.Table, metadata: Mapping[str, str], seed: bytes) -> Callable[[Chance], bytes]:
    def make(chance: Chance) -> bytes:
        kind = chance.random()
        if kind < 0.15:
            return mutated(seed, chance)
        if kind < 0.75:
            at = len(seed) - 8 - int.from_bytes(seed[-8:-4], "little")
            damaged = mutated(seed[at:-8], chance) if chance.random() < 0.6 else seed[at:-8]
            body = seed[: at - 16] if damaged != seed[at:-8] else mutated(seed[: at - 16], chance)
            return _right_checksum(body + bytes(16) + damaged + len(damaged).to_bytes(4, "little") + b"PAR1")
        return encode_checked(_odd_table(table, chance), metadata=_odd_metadata(metadata, chance))

    return make


def _odd_metadata(metadata: Mapping[str, str], chance: Chance) -> dict[str, str]:
    changed = dict(metadata)
    if chance.random() < 0.3:
        key = chance.choice(list(changed))
        changed[key] = str(chance.choice(ODD_VALUES)).encode("utf-8", "replace").decode()
        if chance.random() < 0.2:
            del changed[key]
    return changed


def _odd_table(table: pa.Table, chance: Chance) -> pa.Table:
    rows = table.to_pylist()
    for _ in range(chance.choice((0, 1, 1, 2))):
        if not rows:
            break
        row = chance.choice(rows)
        kind = chance.random()
        if kind < 0.1:
            rows.append(dict(row))
        elif kind < 0.2:
            rows.remove(row)
        else:
            field = chance.choice(table.schema)
            row[field.name] = _odd_cell(field.type, row[field.name], chance)
    schema = pa.schema([pa.field(field.name, field.type) for field in table.schema])
    if chance.random() < 0.05:
        schema = schema.remove(chance.randrange(len(schema)))
        rows = [{name: row[name] for name in schema.names} for row in rows]
    return pa.Table.from_pylist(rows, schema=schema)


def _odd_cell(kind: pa.DataType, value: Any, chance: Chance) -> Any:
    if chance.random() < 0.1:
        return None
    if pa.types.is_integer(kind):
        bits = kind.bit_width
        return (chance.choice(ODD_NUMBERS) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    if pa.types.is_floating(kind):
        return chance.choice((0.0, float("nan"), float("inf"), -1.0, 1e308))
    if pa.types.is_list(kind):
        cells = (_odd_cell(kind.value_type, None, chance) for _ in range(chance.choice((0, 1, 2, 63, 64, 65, 300))))
        return [cell for cell in cells if cell is not None]
    if pa.types.is_fixed_size_binary(kind):
        return chance.randbytes(kind.byte_width)
    if pa.types.is_string(kind):
        texts = [text for text in ODD_VALUES if isinstance(text, str) and text != "\ud800"]
        return chance.choice([*texts, "header", "pad", "rank_local", "{", '{"a":1}', "[", str(value)[::-1]])
    return value


def targets(folder: Path) -> list[Target]:
    """Return every target; the inputs are the files of a small training, which is captured in `folder`."""
    root = folder / "history"
    train(root, width=2, steps=1)
    paths = HistoryPaths(root)
    run = History.open(root).runs()[0].run
    scratch = folder / "scratch"
    scratch.mkdir()

    def at(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
        def reading(data: bytes) -> object:
            path.write_bytes(data)
            return read()

        return reading

    def json_target(name: str, path: Path, read: Callable[[HistoryPaths], object]) -> Target:
        other = scratch / name
        target = other / path.relative_to(root)
        target.parent.mkdir(parents=True)
        return Target(name, 12, _json_input(path.read_bytes()), at(target, lambda: read(HistoryPaths(other))))

    def table_target(name: str, path: Path, read: Callable[[Path], object]) -> Target:
        found = pq.ParquetFile(path)
        metadata = {key.decode(): value.decode() for key, value in (found.metadata.metadata or {}).items()}
        target = scratch / path.name
        make = _table_input(found.read().replace_schema_metadata(None), metadata, path.read_bytes())
        return Target(name, 10, make, at(target, lambda: read(target)))

    tree = encode_tree(OBJECT | {"shared": torch.ones(3)}, known=COMMON_CLASSES, pickle=False)
    tree_file = _tree_file(folder / "state.pt", tree)
    damaged_tree = scratch / "state.pt"
    header = scratch / "header.safetensors"
    manifest, journal, statistics = paths.manifest(run, 1, 0), paths.journal_dir(run), paths.statistics_dir(run)
    prints = paths.fingerprints_dir(run)
    return [
        Target(
            "header", 20, _header_input(paths.data(run, 1, 0).read_bytes()), at(header, lambda: read_header(header))
        ),
        json_target("history.json", paths.history_json, read_history_json),
        json_target("run.json", paths.run_json(run), lambda other: run_rows(read_run_facts(other, run))),
        json_target("marker", paths.marker(run, 1), lambda other: read_marker(other, run, 1)),
        table_target("manifest", manifest, lambda path: _extents(decode_manifest(path.read_bytes(), path=path))),
        table_target("journal", min(journal.iterdir()), lambda path: read_segment(path, run=run)),
        table_target("fingerprints", min(prints.iterdir()), lambda path: list(read_fingerprints(path, run=run))),
        table_target(
            "statistics", min(statistics.iterdir()), lambda path: merged_statistics([read_statistics(path, run=run)])
        ),
        Target(
            "object",
            25,
            _tree_input(encode_object("o", OBJECT).json),
            lambda data: decode_object("o", data, tensor=_tensor),
        ),
        Target(
            "DeepSpeed tree",
            20,
            _tree_input(_plain(tree.json)),
            lambda data: decode_tree(_loaded(data), tree.tensors, what="x", known=COMMON_CLASSES, pickle=False),
        ),
        Target(
            "DeepSpeed file",
            4,
            lambda chance: mutated(tree_file, chance),
            at(damaged_tree, lambda: read_tree(damaged_tree)),
        ),
    ]


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
        odd = content
        for _ in range(chance.choice((1, 1, 2, 3))):
            odd = odd_json(odd, chance)
        if chance.random() < 0.01:
            depth = chance.choice((100, 400, 900, 5000))
            return b'{"a":' * depth + _plain(odd) + b"}" * depth
        return _plain(odd)

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
        text = _plain(odd).ljust(length)
        return len(text).to_bytes(8, "little") + text + seed[8 + length :]

    return make


def _tree_file(path: Path, tree: CheckpointTree) -> bytes:
    writer = native.Writer(backend="posix", budget_bytes=8 << 20, block_bytes=64 << 10, depth=2)
    try:
        FileWrite.start(tree, path, writer=writer, lazy_storages=frozenset(), align=4096, copies=CUDA).finish()
    finally:
        writer.close()
    return path.read_bytes()
