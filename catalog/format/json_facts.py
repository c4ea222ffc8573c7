"""The two files of immutable facts: history.json says what the folder is, run.json what a run was."""

import datetime
import os
import uuid
from dataclasses import asdict
from typing import Any

from catalog.disk import json_file
from catalog.errors import FormatError, NotFoundError
from catalog.paths import FORMAT, MAX_RANKS, HistoryPaths, is_run_id
from catalog.records import RunFacts

__all__ = ["encode_history", "encode_run_facts", "read_history_json", "read_run_facts", "run_names"]


def encode_history() -> bytes:
    """The bytes of history.json for a new history, with a new uuid."""
    now = datetime.datetime.now(datetime.UTC)
    return json_file.encode({"format": FORMAT, "uuid": str(uuid.uuid4()), "created": now.isoformat(timespec="seconds")})


def read_history_json(paths: HistoryPaths) -> dict[str, Any]:
    """The checked content of history.json; FormatError when a newer release wrote it."""
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
    """The bytes of run.json."""
    return json_file.encode({"format": FORMAT, **asdict(facts)})


def run_names(paths: HistoryPaths) -> list[str]:
    """The runs that were born, by name: folders whose name is lawful and whose run.json is there."""
    try:
        names = os.listdir(paths.runs)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if is_run_id(name) and paths.run_json(name).is_file())


def read_run_facts(paths: HistoryPaths, run: str) -> RunFacts:
    """The checked facts of one run. NotFoundError names the runs that exist."""
    path = paths.run_json(run)
    try:
        content = json_file.load(path)
    except FileNotFoundError as error:
        names = ", ".join(run_names(paths)[-10:]) or "none"
        raise NotFoundError(f"no run {run!r} in {paths.root}: there are {names}") from error
    version = content.pop("format", None)
    if version != FORMAT:
        raise FormatError(f"{path}: field format: {version!r}, this release reads {FORMAT}")
    if content.keys() != set(RunFacts.__dataclass_fields__):
        raise FormatError(f"{path}: the fields are {sorted(content)}, must be {sorted(RunFacts.__dataclass_fields__)}")
    facts = RunFacts(**content)
    if facts.run != run:
        raise FormatError(f"{path}: field run: {facts.run!r} in the folder of {run!r}")
    if type(facts.world_size) is not int or not 1 <= facts.world_size <= MAX_RANKS:
        raise FormatError(f"{path}: field world_size: {facts.world_size!r} is no number of ranks")
    for field, kind in (("created", str), ("layout", str), ("facts", dict)):
        if not isinstance(content[field], kind):
            raise FormatError(f"{path}: field {field}: {str(content[field])[:200]!r} is not of type {kind.__name__}")
    parent = (facts.parent_run, facts.parent_step)
    if parent != (None, None) and not (isinstance(parent[0], str) and type(parent[1]) is int and parent[1] >= 0):
        raise FormatError(f"{path}: field parent_run: {parent} is neither empty nor a run and a step")
    return facts
