"""The commit marker: a checkpoint exists exactly when its marker exists.

The marker is a pure function of the manifests of all ranks, so any rank may write it. It is published with link(2),
which fails when the marker exists already, so several ranks may try. It contains the checksum of each manifest and the
size of each data file.
"""

from pathlib import Path
from typing import Any

import native
from catalog.disk import json_file
from catalog.disk.checked_parquet import read_bounded
from catalog.disk.regular_file import check_folders
from catalog.errors import FormatError, MismatchError, NotFoundError
from catalog.format.json_facts import FORMAT
from catalog.format.manifest import Manifest, decode_manifest
from catalog.paths import MAX_RANKS, HistoryPaths
from catalog.records import Marker, MarkerPart

__all__ = ["build_marker", "check_manifest", "encode_marker", "read_marker"]


def build_marker(
    paths: HistoryPaths, *, run: str, step: int, world_size: int, layout_hash: str, own: MarkerPart | None = None
) -> Marker:
    """Build the marker of a checkpoint whose manifests all exist.

    own: what the caller has published itself, and need not read again

    MismatchError when a manifest belongs to another run, step, world size or layout, or when a data file does not have
    the size that its manifest gives; FormatError or CorruptError when a manifest can't be trusted.
    """
    parts = []
    for rank in range(world_size):
        part = own
        if part is None or part.rank != rank:
            path = paths.manifest(run, step, rank)
            data = read_bounded(path)
            manifest = decode_manifest(data, path=path)
            check_manifest(
                manifest, run=run, step=step, rank=rank, world_size=world_size, layout_hash=layout_hash, path=path
            )
            checksum = native.checksum(data).hex()
            part = MarkerPart(rank, paths.relative(path), checksum, manifest.file, manifest.data_bytes)
        size = (paths.root / part.data).stat().st_size
        if size != part.data_bytes:
            raise MismatchError(f"{paths.root / part.data}: {size} bytes, its manifest says {part.data_bytes}")
        parts.append(part)
    return Marker(run, step, world_size, layout_hash, tuple(parts))


def check_manifest(
    manifest: Manifest, *, run: str, step: int, rank: int, world_size: int, layout_hash: str, path: Path
) -> None:
    """Check that a manifest is this rank's part of this checkpoint; MismatchError names the field that differs."""
    for field, actual, expected in (
        ("run", manifest.run, run),
        ("step", manifest.step, step),
        ("rank", manifest.rank, rank),
        ("world_size", manifest.world_size, world_size),
        ("layout", manifest.layout_hash, layout_hash),
    ):
        if actual != expected:
            raise MismatchError(f"{path}: field {field}: {actual} where this checkpoint has {expected}")


def encode_marker(marker: Marker) -> bytes:
    """Return the bytes of commit.json."""
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
    return json_file.encode(
        {
            "format": FORMAT,
            "run": marker.run,
            "step": marker.step,
            "world_size": marker.world_size,
            "layout": marker.layout_hash,
            "parts": parts,
        }
    )


def read_marker(paths: HistoryPaths, run: str, step: int) -> Marker:
    """Read commit.json and check that it is about this run and step and names only files in its own folder.

    NotFoundError when the checkpoint is not committed; FormatError or CorruptError names file and field.
    """
    path = paths.marker(run, step)
    check_folders(path.parent, root=paths.root)
    try:
        content = json_file.load(path)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file; checkpoint {run}:{step} is not committed") from error
    _same(path, "fields", sorted(content), sorted(("format", "run", "step", "world_size", "layout", "parts")))
    _same(path, "format", content["format"], FORMAT)
    _same(path, "run", content["run"], run)
    _same(path, "step", content["step"], step)
    world_size, layout_hash, parts = content["world_size"], content["layout"], content["parts"]
    if type(world_size) is not int or not 1 <= world_size <= MAX_RANKS or not isinstance(layout_hash, str):
        raise FormatError(f"{path}: field world_size: {world_size!r}, or field layout: {layout_hash!r}")
    if not isinstance(parts, list) or len(parts) != world_size:
        raise FormatError(f"{path}: field parts: must be a list of world_size ({world_size}) parts")
    checked = tuple(_part(part, rank, paths, run, step, path) for rank, part in enumerate(parts))
    return Marker(run, step, world_size, layout_hash, checked)


def _part(part: Any, rank: int, paths: HistoryPaths, run: str, step: int, path: Path) -> MarkerPart:
    fields = sorted(("rank", "manifest", "manifest_checksum", "data", "data_bytes"))
    _same(path, f"parts[{rank}]", sorted(part) if isinstance(part, dict) else type(part).__name__, fields)
    _same(path, f"parts[{rank}].rank", part["rank"], rank)
    _same(path, f"parts[{rank}].manifest", part["manifest"], paths.relative(paths.manifest(run, step, rank)))
    _same(path, f"parts[{rank}].data", part["data"], paths.relative(paths.data(run, step, rank)))
    if type(part["data_bytes"]) is not int or part["data_bytes"] < 0:
        raise FormatError(f"{path}: field parts[{rank}].data_bytes: {part['data_bytes']!r} is no size")
    if not isinstance(part["manifest_checksum"], str):
        raise FormatError(
            f"{path}: field parts[{rank}].manifest_checksum: {part['manifest_checksum']!r} is no checksum"
        )
    return MarkerPart(**part)


def _same(path: Path, field: str, actual: Any, expected: Any) -> None:
    if type(actual) is not type(expected) or actual != expected:
        raise FormatError(f"{path}: field {field}: {str(actual)[:300]!r} where {str(expected)[:300]!r} belongs")
