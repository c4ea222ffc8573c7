"""A reader written from docs/format.md alone, without the catalog, unpacks images and reads redo logs: the document is
complete, and the golden files are what it says.
"""

import struct
from pathlib import Path
from typing import Any

import golden_indexed
import zstandard
from document_reader import checked_json, checked_table
from golden_counted_twice import COUNTED_BACK, GRADIENT, SEGMENTS, gradient
from golden_packed_redo import ALONE, KEY, PACKED, TOGETHER, recorded, tensors
from places import GOLDEN_COUNTED_TWICE, GOLDEN_INDEXED, GOLDEN_PACKED_REDO

from catalog.format.redo_segment import RedoTensor
from native import checksum

STORED, ZSTD, ONE_VALUE, QUADS = range(4)
PLAIN, ROTATED, XOR, ROTATED_XOR, DIFFERENCE, INDEXED = range(6)

seen: set[tuple[str, int]] = set()
"""The transforms and codings that were met in the golden files."""


def plane(coding: int, data: bytes, count: int) -> bytes:
    """Return the bytes of a plane of so many elements."""
    seen.add(("coding", coding))
    if coding == QUADS:
        return quads(data, count)
    decode = {STORED: bytes, ZSTD: zstandard.ZstdDecompressor().decompress, ONE_VALUE: lambda one: one * count}
    made = decode[coding](data)
    assert len(made) == count
    return made


def quads(data: bytes, count: int) -> bytes:
    coding, nbytes, other_coding, other_bytes, others = struct.unpack_from("<BQBQQ", data)
    fours = plane(coding, data[26 : 26 + nbytes], -(-count // 4))
    rest = iter(plane(other_coding, data[26 + nbytes : 26 + nbytes + other_bytes], others))
    values = [four >> shift & 3 for four in fours for shift in (0, 2, 4, 6)][:count]
    return bytes(value if value < 3 else next(rest) for value in values)


def unpack(block: bytes, base: bytes) -> bytes:
    """Return the raw bytes for which a packed block stands."""
    version, transform, size, nbytes = struct.unpack_from("<BBBQ", block)
    assert version == 1
    seen.add(("transform", transform))
    at = 11 + 9 * size
    mantissas: tuple[int, ...] = ()
    if transform == INDEXED:
        mantissas = struct.unpack_from(f"<{block[at]}I", block, at + 1)
        at += 1 + 4 * len(mantissas)
    planes = []
    for number in range(size):
        coding, length = struct.unpack_from("<BQ", block, 11 + 9 * number)
        planes.append(plane(coding, block[at : at + length], nbytes // size))
        at += length
    bits = 8 * size
    made = []
    for number in range(nbytes // size):
        t = sum(one[number] << 8 * k for k, one in enumerate(planes))
        b = int.from_bytes(base[number * size : (number + 1) * size], "little")
        rotated = (t >> 1) | (t & 1) << (bits - 1)
        element = {PLAIN: t, ROTATED: rotated, XOR: t ^ b, ROTATED_XOR: rotated ^ b}.get(transform)
        if transform == DIFFERENCE:
            element = (b + ((t >> 1) ^ -(t & 1))) % (1 << bits)
        if transform == INDEXED:
            assert t & 0xFFFF == 0
            mantissa = mantissas[t >> 16 & 127] if t >> 24 else 0
            element = (t >> 23 & 1) << 31 | (t >> 24) << 23 | mantissa
        assert element is not None
        made.append(element.to_bytes(size, "little"))
    return b"".join(made) + block[at:]


def image_bytes(root: Path, file: str) -> bytes:
    """Return the bytes of a data file, made of its packed image."""
    data = (root / file.replace(".safetensors", ".packed")).read_bytes()
    assert data[:8] == data[-8:] == b"DSHPACK1"
    length = int.from_bytes(data[-16:-8], "little")
    table, facts = checked_table(data[-16 - length : -16])
    at, made = 8, bytearray()
    for row in table.to_pylist():
        assert (row["begin"], row["offset"]) == (len(made), at)
        at += row["stored"]
        block = data[row["offset"] : at]
        assert checksum(block) == row["checksum"]
        base = b""
        if row["base"] is not None:
            base = image_bytes(root, row["base"])[row["base_offset"] : row["base_offset"] + row["nbytes"]]
            assert checksum(base) == row["base_checksum"]
        made += unpack(block, base)
    _, run, _, step, name = file.split("/")
    assert (facts["dshistory.packed"], facts["run"], int(facts["step"])) == ("1", run, int(step))
    assert name == f"rank-{int(facts['rank']):05d}.safetensors"
    assert (at, len(made)) == (len(data) - 16 - length, int(facts["data_bytes"]))
    return bytes(made)


def segment(path: Path) -> tuple[dict[str, Any], list[dict[RedoTensor, bytes]]]:
    """Return the footer of a segment, and the tensors of each step."""
    data = path.read_bytes()
    assert data[-8:] == b"DSHREDO1"
    length = int.from_bytes(data[-16:-8], "little")
    footer = checked_json(data[-16 - length : -16])
    at, steps = 0, []
    for step in footer["steps"]:
        found: dict[RedoTensor, bytes] = {}
        for number, nbytes, stored, digest in step["blocks"]:
            block = data[at : at + stored]
            at += stored
            assert checksum(block).hex() == digest
            kind, name, dtype, shape = footer["tensors"][number]
            tensor = RedoTensor(kind, name, dtype, tuple(shape))
            raw = unpack(block, b"")
            assert len(raw) == nbytes
            found[tensor] = found.get(tensor, b"") + raw
        steps.append(found)
    assert at == len(data) - 16 - length
    return footer, steps


def test_it_unpacks_every_tensor_of_the_golden_images() -> None:
    for step in (KEY, PACKED):
        file = f"runs/{ALONE}/steps/{step:012d}/rank-00000.safetensors"
        data = image_bytes(GOLDEN_PACKED_REDO, file)
        rows = checked_table((GOLDEN_PACKED_REDO / file.replace("safetensors", "manifest.parquet")).read_bytes())[0]
        found = {row["name"]: row for row in rows.to_pylist() if row["file"] == file}
        for name, (dtype, content) in tensors(step).items():
            row = found[name]
            assert (row["dtype"], data[row["offset"] : row["offset"] + row["nbytes"]]) == (dtype, content)
        assert all(checksum(data[row["offset"] :][: row["nbytes"]]) == row["checksum"] for row in found.values())


def test_it_reads_the_golden_redo_logs() -> None:
    for run, ranks, version in ((ALONE, 1, 1), (TOGETHER, 2, 2)):
        for rank in range(ranks):
            (path,) = (GOLDEN_PACKED_REDO / "runs" / run / "redo").glob(f"rank-{rank:05d}-*.redo")
            footer, steps = segment(path)
            expected = recorded(run, rank)
            assert (footer["format"], footer["run"], footer["rank"]) == (version, run, rank)
            assert path.name.endswith(f"-{expected[0].step:012d}-to-{expected[-1].step:012d}.redo")
            assert steps == [dict(one.tensors) for one in expected]
            groups: Any = None
            for row, one in zip(footer["steps"], expected, strict=True):
                groups = groups if row["groups"] is None else row["groups"]
                assert (row["step"], groups, row["broken"]) == one[:3]
                assert row.get("applied", True) == one.applied


def test_it_reads_the_golden_log_of_format_3() -> None:
    folder = GOLDEN_COUNTED_TWICE / "runs" / COUNTED_BACK / "redo"
    for version, expected in SEGMENTS:
        path = folder / f"rank-00000-{expected[0].step:012d}-to-{expected[-1].step:012d}.redo"
        footer, steps = segment(path)
        assert footer["format"] == version
        assert steps == [{GRADIENT: gradient(one.step)} if one.broken is None else {} for one in expected]
        groups: Any = None
        for row, one in zip(footer["steps"], expected, strict=True):
            groups = groups if row["groups"] is None else row["groups"]
            assert (row["step"], groups, row["broken"]) == one[:3]
            assert row.get("counted_twice", False) == one.counted_twice
    assert len(list(folder.iterdir())) == len(SEGMENTS)


def test_it_reads_the_golden_log_of_format_4() -> None:
    (path,) = (GOLDEN_INDEXED / "runs" / golden_indexed.CLIPPED / "redo").iterdir()
    footer, steps = segment(path)
    assert footer["format"] == 4
    assert steps == [{golden_indexed.GRADIENT: golden_indexed.gradient(step)} for step in golden_indexed.STEPS]


def test_the_golden_files_have_every_transform_and_every_coding() -> None:
    test_it_unpacks_every_tensor_of_the_golden_images()
    test_it_reads_the_golden_redo_logs()
    test_it_reads_the_golden_log_of_format_4()
    codings = {("coding", coding) for coding in (STORED, ZSTD, ONE_VALUE, QUADS)}
    assert seen == codings | {("transform", one) for one in (PLAIN, ROTATED, XOR, ROTATED_XOR, DIFFERENCE, INDEXED)}
