"""Says what exactness needs: what a run has recorded of everything that its bits depend on, and what of it two runs do
not share."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.records import CheckpointRef, RunFacts
from dshistory.display.table import Table

__all__ = ["environment_differences", "likely_causes", "reproducibility"]

_SCHEMA: Final = pa.schema([("what", pa.string()), ("status", pa.string()), ("detail", pa.string())])

_APART: Final = ("command", "folder")
"""A replay may have these otherwise without another bit."""

_OBJECTS: Final = {
    "rng": "random number generators",
    "dataloader": "position of the data loader",
    "lr_scheduler": "learning rate scheduler",
    "loss_scaler": "gradient scaler",
}


def reproducibility(history: History, run: str) -> Table:
    """See `Explorer.reproducibility`."""
    facts = history.run_facts(run)
    steps = history.steps(run)
    if not steps:
        raise NotFoundError(f"run {run} of {history.root} has no committed checkpoint yet")
    rows = [*_of_state(history, CheckpointRef(run, steps[-1]), facts), *_of_environment(facts)]
    open_ones = sum(row["status"] != "captured" for row in rows)
    note = f"run {run}: " + (f"{open_ones} things are not captured or may differ" if open_ones else "all is captured")
    return Table(pa.Table.from_pylist(rows, schema=_SCHEMA), note=note)


def environment_differences(one: RunFacts, other: RunFacts) -> dict[str, tuple[Any, Any]]:
    """Return what of the environment two runs do not share, by name, with both values; {} when one has recorded none.

    A command line or a folder is no difference.
    """
    sides = [dict(_flat("", facts.facts.get("environment") or {})) for facts in (one, other)]
    if not all(sides):
        return {}
    sides[0]["world size"], sides[1]["world size"] = one.world_size, other.world_size
    names = sorted(name for name in sides[0] | sides[1] if name.split(".")[0] not in _APART and name != "code.diff")
    return {
        name: (sides[0].get(name), sides[1].get(name)) for name in names if sides[0].get(name) != sides[1].get(name)
    }


def likely_causes(history: History, ref: CheckpointRef, run: str) -> list[str]:
    """Return in words what may make `run`, a replay from `ref`, differ from the run of `ref`: state that was not
    captured, other arguments of the same script, and differences of the environment."""
    facts, again = history.run_facts(ref.run), history.run_facts(run)
    causes = [f"the {row['what']} was not captured" for row in _of_state(history, ref, facts) if _is_missing(row)]
    causes += _other_arguments(facts, again)
    for name, (before, after) in environment_differences(facts, again).items():
        causes.append(f"{name.replace('_', ' ')} is {after!r}, was {before!r}")
    return causes


def _other_arguments(one: RunFacts, other: RunFacts) -> Iterator[str]:
    """Yield in words what the same script was called with, where that is not the same."""
    scripts, arguments = zip(*(_command(facts) for facts in (one, other)), strict=True)
    if scripts[0] and scripts[0] == scripts[1] and arguments[0] != arguments[1]:
        before, after = (shlex.join(of_run) or "none" for of_run in arguments)
        yield f"the arguments of {scripts[0]} are {after}, were {before}"


def _command(facts: RunFacts) -> tuple[str, list[str]]:
    """Return the name of a run's script, without its folder, and its arguments; "" where no script is on record."""
    command: list[str] = (facts.facts.get("environment") or {}).get("command", [])
    place = next((place for place, one in enumerate(command) if one.endswith(".py")), None)
    return ("", []) if place is None else (Path(command[place]).name, command[place + 1 :])


def _is_missing(row: Mapping[str, str]) -> bool:
    return row["status"] == "not captured"


def _of_state(history: History, ref: CheckpointRef, facts: RunFacts) -> Iterator[dict[str, str]]:
    objects = {extent.name for extent in history.extents(ref, kinds=["object"])}
    for name, what in _OBJECTS.items():
        if name in objects:
            yield _row(what, "captured", "")
        elif name == "rng":
            yield _row(what, "not captured", "the run is imported, or of an earlier release")
        elif name == "dataloader":
            yield _row(what, "not captured", "pass capture.enable(..., dataloader=loader)")
        elif name == "lr_scheduler" and _has_schedule(history, ref):
            yield _row(what, "not captured", "the learning rate moves: pass capture.enable(..., scheduler=scheduler)")


def _has_schedule(history: History, ref: CheckpointRef) -> bool:
    """Return whether the rate of the run's groups has moved, which somebody must have done who is not captured."""
    rows = history.query("SELECT DISTINCT value FROM metrics WHERE run = ? AND name = 'lr' LIMIT 2", [ref.run])
    return bool(rows.num_rows > 1)


def _of_environment(facts: RunFacts) -> Iterator[dict[str, str]]:
    environment = facts.facts.get("environment")
    if not environment:
        yield _row("environment", "not captured", "the run is imported, or of an earlier release")
        return
    code = environment["code"]
    if code["commit"] is None:
        yield _row("code", "not captured", "the script is in no git repository that can be read")
    elif code["diff"] is None:
        yield _row("code", "may differ", f"commit {code['commit']}; git did not tell in time what was edited since")
    else:
        edited = f", edited since (diff of {len(code['diff'])} characters kept)" if code["diff"] else ""
        yield _row("code", "captured", f"commit {code['commit']}{edited}")
    yield _row("command line", "captured", " ".join(environment["command"]))
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    yield _row("versions", "captured", f"python {environment['python']}, {packages}")
    yield _row("world size", "captured", str(facts.world_size))
    threads = environment["threads"]
    yield _row("threads", "captured", f"{threads['intra_op']} within an operation, {threads['inter_op']} between them")
    yield _row("processor", "captured", " ".join(map(str, environment["processor"].values())))
    yield from _of_determinism(environment)


def _of_determinism(environment: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    flags, devices = environment["flags"], environment["devices"]
    if not devices:
        yield _row("kernels", "captured", "torch's on a processor give the same bits with the same number of threads")
        return
    yield _row("devices", "captured", ", ".join(devices["names"]))
    if not flags["deterministic_algorithms"]:
        yield _row("kernels", "may differ", "call torch.use_deterministic_algorithms(True) in the script")
    elif "CUBLAS_WORKSPACE_CONFIG" not in environment["variables"]:
        yield _row("kernels", "may differ", "set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the script starts")
    else:
        yield _row("kernels", "captured", "deterministic algorithms are on")
    if flags["cudnn.benchmark"]:
        yield _row("cuDNN", "may differ", "torch.backends.cudnn.benchmark chooses kernels by their speed: turn it off")


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else name, one)
    else:
        yield prefix, value


def _row(what: str, status: str, detail: str) -> dict[str, str]:
    return {"what": what, "status": status, "detail": detail}
