"""Well-formed but senseless files, by Hypothesis: their checksums fit, and their fields hold anything.

The fuzzer damages files that are right; these are built from nothing, so that they reach combinations that no damage
leads to, and a failure is shrunk to the smallest one.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture.state.objects import decode_object
from catalog.disk import json_file
from catalog.disk.checked_parquet import encode_checked
from catalog.errors import HistoryError
from catalog.format.dtypes import DTYPES
from catalog.format.extents import SCHEMA
from catalog.format.header import parse_header
from catalog.format.manifest import decode_manifest
from catalog.format.marker import read_marker
from catalog.index.ingest import run_rows
from catalog.paths import HistoryPaths, data_file
from catalog.read.runs import run_facts

__all__ = ["STRUCTURES", "read_structures"]

RUN, STEP = "run-a", 5
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
TAGS = ("tuple", "dict", "float", "bytes", "tensor", "ndarray", "dtype", "device", "other")
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.fixed_dictionaries(
            {"$": st.sampled_from(TAGS)},
            optional={
                "items": st.lists(inner | st.lists(inner, min_size=2, max_size=2), max_size=3) | inner,
                "hex": st.sampled_from(["nan", "inf", "-inf", "0x1p3", "x"]) | inner,
                "base64": st.sampled_from(["", "AAAAAA==", "AA", "?"]) | inner,
                "name": st.sampled_from([*DTYPES, "cpu", "cuda:9"]) | inner,
                "entry": st.sampled_from(["o/0", "o/1"]) | inner,
                "dtype": st.sampled_from(list(DTYPES)) | inner,
                "shape": st.lists(st.integers(-2, 4), max_size=3) | inner,
            },
        )
    ),
    max_leaves=12,
)
PART = st.fixed_dictionaries(
    {
        "rank": st.just(0) | JSON,
        "manifest": st.just(f"runs/{RUN}/steps/{STEP:012d}/rank-00000.manifest.parquet") | JSON,
        "manifest_checksum": st.just("0" * 32) | JSON,
        "data": st.just(data_file(RUN, STEP, 0)) | JSON,
        "data_bytes": st.integers(-1, 2**63) | JSON,
    }
)
MARKERS = st.fixed_dictionaries(
    {
        "format": st.just(1) | JSON,
        "run": st.just(RUN) | JSON,
        "step": st.just(STEP) | JSON,
        "world_size": st.just(1) | JSON,
        "layout": st.just("l") | JSON,
        "parts": st.lists(PART, min_size=1, max_size=2) | JSON,
    }
)
RUNS = st.fixed_dictionaries(
    {
        "format": st.just(1) | JSON,
        "run": st.just(RUN) | JSON,
        "created": st.sampled_from(["2026-11-21T10:15:02+00:00", "0001-01-01T00:00:00+14:00", "2026"]) | JSON,
        "world_size": st.just(1) | JSON,
        "parent_run": st.none() | st.just("run-0") | JSON,
        "parent_step": st.none() | st.integers(-1, 2**70) | JSON,
        "layout": st.just("l") | JSON,
        "facts": st.dictionaries(st.text(max_size=4), JSON, max_size=2) | JSON,
    }
)
NUMBERS = st.sampled_from([0, 1, 2, 4096, 8192, -1, 2**56, 2**63 - 1]) | st.integers(0, 2**63 - 1)
EXTENT = st.fixed_dictionaries(
    {
        "name": st.text(max_size=4),
        "kind": st.sampled_from(["header", "pad", "model", "object"]),
        "dtype": st.sampled_from(["U8", "F32", "X"]),
        "shape": st.lists(NUMBERS, max_size=3),
        "start": NUMBERS,
        "numel": NUMBERS,
        "file": st.sampled_from([data_file(RUN, STEP, 0), data_file(RUN, 1, 0), "../x"]),
        "offset": NUMBERS,
        "nbytes": NUMBERS,
        "checksum": st.just(bytes(16)),
        "placement": st.sampled_from(["partitioned", "replicated", "rank_local", "x"]),
        "aliases": st.lists(st.text(max_size=3), max_size=2),
        "codec": st.sampled_from(["raw", "zip"]),
        "base": st.none() | st.just("x"),
    }
)
FACTS = st.fixed_dictionaries(
    {
        "dshistory.manifest": st.just("1") | st.text(max_size=3),
        "run": st.just(RUN) | st.text(max_size=3),
        "step": st.just(str(STEP)) | st.text(max_size=3) | st.sampled_from(["٣", "-0", "9" * 5000]),
        "rank": st.just("0") | st.text(max_size=3),
        "world_size": st.just("1") | st.text(max_size=3),
        "layout": st.text(max_size=3),
        "created": st.just("2026-11-21T10:15:02+00:00") | st.text(max_size=3),
        "data_bytes": st.sampled_from(["4096", "0", "-1"]) | st.text(max_size=3),
    }
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "X"]) | JSON,
        "shape": st.lists(st.integers(0, 4), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2) | JSON,
    }
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]) | st.text(max_size=3), ENTRY | JSON, max_size=3)


def _file(folder: Path, path: Path, content: dict[str, Any]) -> HistoryPaths:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(json_file.encode(content))
    return HistoryPaths(folder)


def _read_marker(folder: Path, content: dict[str, Any]) -> None:
    read_marker(_file(folder, HistoryPaths(folder).marker(RUN, STEP), content), RUN, STEP)


def _read_run(folder: Path, content: dict[str, Any]) -> None:
    run_rows(run_facts(_file(folder, HistoryPaths(folder).run_json(RUN), content), RUN))


def _read_manifest(folder: Path, content: tuple[list[dict[str, Any]], dict[str, str]]) -> None:
    rows, facts = content
    data = encode_checked(pa.Table.from_pylist(rows, schema=SCHEMA), metadata=facts)
    decode_manifest(data, path=HistoryPaths(folder).manifest(RUN, STEP, 0))


def _read_header(folder: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content).encode()
    parse_header(text, file_bytes=8 + len(text) + 16, path=folder / "x.safetensors")


def _read_tree(folder: Path, content: Any) -> None:
    import torch

    decode_object("o", json.dumps(content).encode(), tensor={"o/0": torch.ones(3)}.__getitem__)


STRUCTURES: dict[str, tuple[st.SearchStrategy[Any], Callable[[Path, Any], None]]] = {
    "markers": (MARKERS, _read_marker),
    "runs": (RUNS, _read_run),
    "manifests": (st.tuples(st.lists(EXTENT, max_size=3), FACTS), _read_manifest),
    "headers": (HEADERS, _read_header),
    "objects": (TREES, _read_tree),
}


def read_structures(name: str, folder: Path, *, examples: int) -> int:
    """Read so many structures of one kind, and return how many it were. Anything but a HistoryError is raised."""
    strategy, read = STRUCTURES[name]
    count = 0

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def check(content: Any) -> None:
        nonlocal count
        count += 1
        with suppress(HistoryError):
            read(folder, content)

    check()
    return count
