"""The commit marker: with it a checkpoint exists, without it there is none.

The marker is a pure function of the manifests of all ranks, so any rank may write it, and it is published with link(2),
which fails when it exists already. It names each manifest's checksum and each data file's size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import native
from catalog import jsonfile
from catalog.errors import FormatError, MismatchError
from catalog.layout import HistoryPaths
from catalog.manifest import decode_manifest
from catalog.records import Extent, Marker, MarkerPart

__all__ = ["build_marker", "encode_marker", "own_data_file", "read_marker"]


def own_data_file(extents: Sequence[Extent]) -> tuple[str, int]:
    """The data file that a manifest's header row stands for, and its size: the end of its last extent."""
    file = next((extent.file for extent in extents if extent.kind == "header"), None)
    if file is None:
        raise FormatError("the manifest has no header row")
    return file, max(extent.offset + extent.nbytes for extent in extents if extent.file == file)


def build_marker(paths: HistoryPaths, *, run: str, step: int, world_size: int, layout: str) -> Marker:
    """The marker of a checkpoint whose manifests all exist; MismatchError when one belongs to another run, step, world
    size or layout.
    """
    expected = {"run": run, "step": str(step), "world_size": str(world_size), "layout": layout}
    parts = []
    for rank in range(world_size):
        path = paths.manifest(run, step, rank)
        data = path.read_bytes()
        extents, facts = decode_manifest(data, path=path)
        for field, value in {**expected, "rank": str(rank)}.items():
            if facts.get(field) != value:
                raise MismatchError(f"{path}: field {field}: {facts.get(field)} where this checkpoint has {value}")
        file, nbytes = own_data_file(extents)
        parts.append(MarkerPart(rank, paths.relative(path), native.checksum(data).hex(), file, nbytes))
    return Marker(run, step, world_size, layout, tuple(parts))


def encode_marker(marker: Marker) -> bytes:
    """The bytes of commit.json."""
    parts = [
        {
            "rank": part.rank,
            "manifest": part.manifest,
            "manifest_checksum": part.manifest_checksum,
            "data": part.data,
            "data_bytes": part.data_bytes,
        }
        for part in marker.parts
    ]
    return jsonfile.encode(
        {
            "format": 1,
            "run": marker.run,
            "step": marker.step,
            "world_size": marker.world_size,
            "layout": marker.layout,
            "parts": parts,
        }
    )


def read_marker(paths: HistoryPaths, run: str, step: int) -> Marker:
    """Read and check commit.json: it must speak of this run and step, and of files in its own folder. FileNotFoundError
    when not committed.
    """
    path = paths.marker(run, step)
    content = jsonfile.load(path)
    try:
        parts = tuple(MarkerPart(**part) for part in content["parts"])
        marker = Marker(content["run"], content["step"], content["world_size"], content["layout"], parts)
    except (KeyError, TypeError) as error:
        raise FormatError(f"{path}: a field is missing or unknown: {error}") from error
    _check(marker, paths, run, step, path)
    return marker


def _check(marker: Marker, paths: HistoryPaths, run: str, step: int, path: Path) -> None:
    _same(path, "run", marker.run, run)
    _same(path, "step", marker.step, step)
    _same(path, "parts", [part.rank for part in marker.parts], list(range(marker.world_size)))
    for part in marker.parts:
        _same(path, "manifest", part.manifest, paths.relative(paths.manifest(run, step, part.rank)))
        _same(path, "data", part.data, paths.relative(paths.data(run, step, part.rank)))
        if not isinstance(part.data_bytes, int) or part.data_bytes < 0:
            raise FormatError(f"{path}: field data_bytes: {part.data_bytes!r}")


def _same(path: Path, field: str, actual: Any, expected: Any) -> None:
    if actual != expected:
        raise FormatError(f"{path}: field {field}: {actual!r} where {expected!r} belongs")
