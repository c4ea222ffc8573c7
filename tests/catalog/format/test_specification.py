"""A reader written from docs/format.md alone, without the catalog, reads a history: the document is complete."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from capture_helpers import bits
from catalog_helpers import Piece, Run
from document_reader import checked_json, checked_table
from mixed_precision import captured_mixed, codecs
from places import GOLDEN, ROOT

from catalog.history import History
from native import checksum

DOCUMENT = (ROOT / "docs" / "format.md").read_text()
ITEM_BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "U32": 4, "I64": 8}


def read_data_file(path: Path, rows: list[dict[str, Any]]) -> None:
    """Check that header and manifest describe the same bytes, each exactly once, with valid checksums."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 4096 == len(data) % 4096 == 0
    header = json.loads(data[8:start])
    assert header.pop("__metadata__")["format"] == "dshistory-1"
    assert data[start - 1 : start] in (b"}", b" ")
    at = 0
    for row in sorted(rows, key=lambda row: (row["offset"], row["nbytes"])):
        assert row["offset"] == at
        at += row["nbytes"]
        assert checksum(data[row["offset"] : at]) == row["checksum"]
        if row["kind"] == "header":
            assert row["nbytes"] == start
            continue
        key = row["name"] if row["kind"] == "pad" else f"{row['kind']}/{row['name']}"
        whole = row["numel"] == pa.array([1, *row["shape"]]).to_numpy().prod()
        key += "" if whole else f"[{row['start']}:{row['start'] + row['numel']}]"
        entry = header.pop(key)
        assert entry["data_offsets"] == [row["offset"] - start, at - start]
        assert entry["shape"] == (row["shape"] if whole else [row["numel"]])
        assert (entry["dtype"], row["nbytes"]) == (row["dtype"], row["numel"] * ITEM_BYTES[row["dtype"]])
    assert (at, header) == (len(data), {})


def bytes_of(root: Path, row: dict[str, Any]) -> bytes:
    """Return the bytes of a row, made by arithmetic on numbers alone where they are rounded."""
    data = (root / row["file"]).read_bytes()
    if row["codec"] == "raw":
        return data[row["offset"] : row["offset"] + row["nbytes"]]
    assert (row["codec"], row["base"]) == ("rounded", "F32")
    numbers = struct.unpack(f"<{row['numel']}f", data[row["offset"] : row["offset"] + 4 * row["numel"]])
    made = b"".join(rounded(number, row["dtype"]).to_bytes(2, "little") for number in numbers)
    assert checksum(made) == row["checksum"]
    return made


def rounded(number: float, dtype: str) -> int:
    """Round to the nearest number of 16 bits, ties to even, by counting in units of its last bit."""
    bits, least, bias = {"BF16": (7, -126, 127), "F16": (10, -14, 15)}[dtype]
    if math.isnan(number):
        return (2 * bias + 1) << bits | 1 << (bits - 1)
    sign = (2 * bias + 2) << bits if math.copysign(1, number) < 0 else 0
    if number == 0 or math.isinf(number):
        return sign | (0 if number == 0 else (2 * bias + 1) << bits)
    exponent = max(math.frexp(abs(number))[1] - 1, least)
    units = round(abs(number) / 2.0 ** (exponent - bits))  # Python rounds ties to even
    return sign | min(((exponent - least) << bits) + units, (2 * bias + 1) << bits)


def read_checkpoint(root: Path, run: str, step: int) -> dict[tuple[str, str], bytes]:
    """Return every logical tensor, providers' tensors also as those to look at, and for tensors local to ranks that of
    rank 0."""
    marker = checked_json((root / "runs" / run / "steps" / f"{step:012d}" / "commit.json").read_bytes())
    assert (marker["format"], marker["run"], marker["step"]) == (1, run, step)
    tensors: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
    for part in marker["parts"]:
        path = root / part["manifest"]
        assert checksum(path.read_bytes()).hex() == part["manifest_checksum"]
        table, facts = checked_table(path.read_bytes())
        assert facts["rank"] == str(part["rank"])
        assert facts["dshistory.manifest"] == "1"
        assert int(facts["data_bytes"]) == part["data_bytes"] == (root / part["data"]).stat().st_size
        rows = table.to_pylist()
        own = [row for row in rows if row["file"] == part["data"] and row["codec"] == "raw"]
        read_data_file(root / part["data"], own)
        for row in rows:
            if row["kind"] not in ("header", "pad") and (row["placement"] != "rank_local" or part["rank"] == 0):
                data = bytes_of(root, row)
                tensors.setdefault((row["kind"], row["name"]), []).append((row["start"], data))
                for place in row["aliases"] if row["kind"] == "object_tensor" else ():
                    tensors.setdefault((row["name"].rpartition("/")[0], place), []).append((row["start"], data))
    return {key: b"".join(data for _, data in sorted(members)) for key, members in tensors.items()}


def test_a_reader_written_from_the_document_reads_the_golden_history() -> None:
    assert checked_json((GOLDEN / "history.json").read_bytes())["format"] == 1
    history = History.open(GOLDEN)
    for facts in history.runs():
        content = checked_json((GOLDEN / "runs" / facts.run / "run.json").read_bytes())
        assert (content["run"], content["facts"], content["parent_step"]) == (facts.run, facts.facts, facts.parent_step)
        for step in history.steps(facts.run):
            tensors = read_checkpoint(GOLDEN, facts.run, step)
            assert tensors["model", "layer.w"].hex() == "0000003f000080bf000000400000807f"
            assert json.loads(tensors["object", "rng"])["python"]["$"] == "tuple"


def test_it_reads_the_tensors_of_a_provider(history: Path) -> None:
    with Run(history) as run:
        tree = b'{"shadow":{"w":{"$":"tensor","entry":"ema/0"}}}'
        rows = [
            Piece("w", bytes(8), dtype="F32", shape=(2,)),
            Piece("ema/0", b"\0\0\x80?" * 2, "object_tensor", "F32", shape=(2,), aliases=("shadow.w",)),
            Piece("ema", tree, kind="object"),
        ]
        run.checkpoint(10, rows)
        read = read_checkpoint(history, run.run, 10)
        assert read["ema", "shadow.w"] == read["object_tensor", "ema/0"] == b"\0\0\x80?" * 2
        opened = History.open(history)
        shown = opened.state_extents(opened.resolve(10))
        assert [(extent.kind, extent.name) for extent in shown] == [("ema", "shadow.w"), ("model", "w")]
        kept = opened.extents(opened.resolve(10), kinds=["object_tensor"])
        assert [(extent.name, extent.aliases) for extent in kept] == [("ema/0", ("shadow.w",))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_reads_weights_that_are_their_masters_rounded(history: Path, dtype: torch.dtype) -> None:
    for ref, state in captured_mixed(history, dtype, width=8, steps=2).items():
        run, step = ref.split(":")
        read = read_checkpoint(history, run, int(step))
        for name, tensor in state["model"].items():
            assert read["model", name] == bits(tensor)
    assert "rounded" in codecs(history).values()


def test_it_reads_the_journal() -> None:
    (folder, *_) = sorted(GOLDEN.glob("runs/*/journal"))
    rows = []
    for path in sorted(folder.iterdir()):
        table, facts = checked_table(path.read_bytes())
        assert facts == {"dshistory.journal": "1", "run": folder.parent.name} | {
            key: value for key, value in facts.items() if key.startswith("ARROW")
        }
        rows += table.to_pylist()
    assert {(row["kind"], row["name"]) for row in rows} == {("metric", "loss"), ("event", "failed"), ("tag", "good")}


@pytest.mark.parametrize("table", ["runs", "checkpoints", "tensors", "fragments", "metrics", "events", "tags"])
def test_the_document_names_every_column_of_every_table(table: str, history: Path) -> None:
    described = DOCUMENT[DOCUMENT.index("## The catalog in SQL") :]
    section = described[described.index(f"`{table}`") :]
    with Run(history):
        columns = History.open(history).query(f"SELECT * FROM {table} LIMIT 0").column_names
    assert not [column for column in columns if column not in section]
