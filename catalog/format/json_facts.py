"""The two JSON files of immutable facts: history.json identifies a history, run.json describes a run."""

import datetime
import uuid
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from catalog.disk import json_file
from catalog.errors import FormatError
from catalog.paths import MAX_RANKS, HistoryPaths, parse_step_dir
from catalog.records import RunFacts

__all__ = ["FORMAT", "decode_run_facts", "encode_history", "encode_run_facts", "read_history_json"]

FORMAT = 1
"""The version of the format, in the field `format` of every JSON file of a history."""

_LAYOUT = "layout"
"""The name in run.json of the field `layout_hash` of RunFacts."""


def encode_history() -> bytes:
    """Return the bytes of history.json for a new history, with a new uuid."""
    now = datetime.datetime.now(datetime.UTC)
    return json_file.encode({"format": FORMAT, "uuid": str(uuid.uuid4()), "created": now.isoformat(timespec="seconds")})


def read_history_json(paths: HistoryPaths) -> dict[str, Any]:
    """Return the checked content of history.json; FormatError when a newer release wrote it."""
    path = paths.history_json
    content = json_file.load(path)
    version = content.get("format")
    if type(version) is int and version > FORMAT:
        raise FormatError(f"{path}: field format: {version}, this release reads up to {FORMAT}: use a newer release")
    if type(version) is not int or version != FORMAT:
        raise FormatError(f"{path}: field format: {version!r} is no format of a history")
    if content.keys() != {"format", "uuid", "created"} or not all(
        isinstance(content[key], str) for key in ("uuid", "created")
    ):
        raise FormatError(f"{path}: must have format, uuid and created, has {sorted(content)}")
    return content


def encode_run_facts(facts: RunFacts) -> bytes:
    """Return the bytes of run.json."""
    content = asdict(facts)
    content[_LAYOUT] = content.pop("layout_hash")
    return json_file.encode({"format": FORMAT, **content})


def decode_run_facts(data: bytes, *, path: Path, run: str) -> RunFacts:
    """Return the facts of `run` from the bytes of its run.json, every field checked. FormatError and CorruptError,
    which begin with `path`, name the field that is not as the format says."""
    content = json_file.decode(data, path=path)
    version = content.pop("format", None)
    if version != FORMAT:
        raise FormatError(f"{path}: field format: {version!r}, this release reads {FORMAT}")
    expected = {field.name for field in fields(RunFacts)} - {"layout_hash"} | {_LAYOUT}
    if content.keys() != expected:
        raise FormatError(f"{path}: the fields are {sorted(content)}, must be {sorted(expected)}")
    for field, kind in (("created", str), (_LAYOUT, str), ("facts", dict)):
        if not isinstance(content[field], kind):
            raise FormatError(f"{path}: field {field}: {str(content[field])[:200]!r} is not of type {kind.__name__}")
    facts = RunFacts(layout_hash=content.pop(_LAYOUT), **content)
    if facts.run != run:
        raise FormatError(f"{path}: field run: {facts.run!r} in the folder of {run!r}")
    if type(facts.world_size) is not int or not 1 <= facts.world_size <= MAX_RANKS:
        raise FormatError(f"{path}: field world_size: {facts.world_size!r} is no number of ranks")
    parent = (facts.parent_run, facts.parent_step)
    if parent != (None, None) and not (isinstance(parent[0], str) and _is_step(parent[1])):
        raise FormatError(f"{path}: field parent_run: {parent} is neither empty nor a run and a step")
    return facts


def _is_step(value: object) -> bool:
    return type(value) is int and value >= 0 and parse_step_dir(f"{value:012d}") is not None
