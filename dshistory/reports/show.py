"""Tables of the content of a history: runs, the parts of a checkpoint, tags and damage, all from the catalog."""

from collections.abc import Sequence
from datetime import datetime
from math import prod
from typing import Final

import pyarrow as pa

from catalog import verify as verification
from catalog.errors import HistoryError
from catalog.history import History
from catalog.records import CheckpointRef, Extent, MarkerPart
from dshistory.display.formats import Format, counted
from dshistory.display.progress import ByteProgress
from dshistory.display.report import Report
from dshistory.display.table import Table
from dshistory.reports.equal_weights import EqualWeights, equal_weights

__all__ = ["overview", "show", "tags", "verify"]

_FORMATS: Final[dict[str, Format]] = {"bytes": "bytes", "derived": "bytes"}

_TAGS: Final = "SELECT name AS tag, run, step FROM tags ORDER BY name"


def tags(history: History) -> Table:
    """See `Explorer.tags`."""
    rows = history.query(_TAGS)
    return Table(rows, note="" if rows.num_rows else "no tags")


def overview(history: History) -> Report:
    """Summarize the history: its runs, and the checkpoints of each."""
    runs = history.runs()
    committed = history.checkpoints()
    rows = [
        {
            "run": facts.run,
            "created": datetime.fromisoformat(facts.created),
            "parent": None if facts.parent_run is None else f"{facts.parent_run}:{facts.parent_step}",
            "world_size": facts.world_size,
            "checkpoints": len(steps := [ref.step for ref in committed if ref.run == facts.run]),
            "first": min(steps, default=None),
            "last": max(steps, default=None),
        }
        for facts in runs
    ]
    facts = {"runs": len(runs), "checkpoints": len(committed)}
    return Report(f"history {history.root}", facts, {"runs": Table(pa.Table.from_pylist(rows, schema=_RUNS_SCHEMA))})


_RUNS_SCHEMA: Final = pa.schema(
    [
        ("run", pa.string()),
        ("created", pa.timestamp("us", tz="UTC")),
        ("parent", pa.string()),
        ("world_size", pa.int64()),
        ("checkpoints", pa.int64()),
        ("first", pa.int64()),
        ("last", pa.int64()),
    ]
)


def show(history: History, ref: CheckpointRef) -> Report:
    """See `Explorer.show`."""
    tensors = history.state_extents(ref)
    marker = history.marker(ref)
    run = history.run_facts(ref.run)
    facts = {
        "run": ref.run,
        "step": ref.step,
        "world size": marker.world_size,
        "parent": None if run.parent_run is None else f"{run.parent_run}:{run.parent_step}",
        "holds": run.holds or "all of the training's state",
        "writer backend": run.facts.get("backend"),
        "tensors": len({(extent.kind, extent.name) for extent in tensors}),
        "bytes": sum(part.data_bytes for part in marker.parts),
        "folder": str(history.paths.step_dir(ref.run, ref.step)),
    }
    objects = [
        {"object": extent.name, "placement": extent.placement, "bytes": extent.nbytes}
        for extent in history.extents(ref, kinds=["object"])
    ]
    files = [{"file": part.data, "rank": part.rank, "bytes": part.data_bytes} for part in marker.parts]
    tables = {
        "kinds": Table(pa.Table.from_pylist(_kinds(tensors), schema=_KINDS_SCHEMA), formats=_FORMATS),
        "objects": Table(pa.Table.from_pylist(objects, schema=_OBJECTS_SCHEMA), formats=_FORMATS),
        "files": Table(pa.Table.from_pylist(files, schema=_FILES_SCHEMA), formats=_FORMATS),
    }
    return Report(f"checkpoint {ref}", facts, tables, _FORMATS)


_KINDS_SCHEMA: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("dtype", pa.string()),
        ("tensors", pa.int64()),
        ("elements", pa.int64()),
        ("bytes", pa.int64()),
        ("derived", pa.int64()),
    ]
)
_OBJECTS_SCHEMA: Final = pa.schema([("object", pa.string()), ("placement", pa.string()), ("bytes", pa.int64())])
_FILES_SCHEMA: Final = pa.schema([("file", pa.string()), ("rank", pa.int64()), ("bytes", pa.int64())])


def _kinds(extents: Sequence[Extent]) -> list[dict[str, object]]:
    """Return a row for each kind and dtype; elements count logical tensors, bytes what all ranks store, and derived
    what readers make of their masters."""
    groups: dict[tuple[str, str], list[Extent]] = {}
    for extent in extents:
        groups.setdefault((extent.kind, extent.dtype), []).append(extent)
    return [
        {
            "kind": kind,
            "dtype": dtype,
            "tensors": len(shapes := {extent.name: extent.shape for extent in group}),
            "elements": sum(map(prod, shapes.values())),
            "bytes": sum(extent.nbytes for extent in group if not extent.is_rounded),
            "derived": sum(extent.nbytes for extent in group if extent.is_rounded),
        }
        for (kind, dtype), group in groups.items()
    ]


def _parts(history: History, ref: CheckpointRef) -> tuple[MarkerPart, ...]:
    """Return the parts of a checkpoint, as far as its marker can be read."""
    try:
        return history.marker(ref).parts
    except (HistoryError, OSError):
        return ()


def verify(history: History, refs: Sequence[CheckpointRef] | None, *, quiet: bool) -> Table:
    """See `Explorer.verify`."""
    checked = history.checkpoints() if refs is None else list(refs)
    total = sum(part.data_bytes for ref in checked for part in _parts(history, ref))
    with ByteProgress(total, description="verify", quiet=quiet) as bar:
        problems = verification.verify(history, refs, progress=bar.advance)
    rows = [{"file": problem.file, "field": problem.field, "problem": problem.message} for problem in problems]
    if not rows:
        rows = [_stale(history, one) for one in equal_weights(history, set(checked))]
    found = counted(len(rows), "problem") if rows else "no problem"
    note = (
        f"{counted(len(checked), 'checkpoint')} verified: {found}"
        if checked
        else f"no checkpoint yet in {history.root}"
    )
    return Table(pa.Table.from_pylist(rows, schema=_PROBLEMS_SCHEMA), note=note)


def _stale(history: History, equal: EqualWeights) -> dict[str, str]:
    folder = history.paths.relative(history.paths.step_dir(equal.ref.run, equal.ref.step))
    return {"file": folder, "field": "weights", "problem": str(equal)}


_PROBLEMS_SCHEMA: Final = pa.schema([("file", pa.string()), ("field", pa.string()), ("problem", pa.string())])
