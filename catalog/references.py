"""From what a person writes to the checkpoint meant: ints, "latest", -1, "best", each also of a run ("run:best"), tags."""

from __future__ import annotations

import difflib
import operator
from typing import TYPE_CHECKING

from catalog.errors import NotFoundError, SetupError
from catalog.format.json_facts import run_names
from catalog.records import CheckpointRef

if TYPE_CHECKING:
    from catalog.history import History

__all__ = ["committed_lineage", "lineage", "resolve"]


def lineage(history: History, run: str) -> list[CheckpointRef]:
    """The committed checkpoints a run can go back to, ascending by step: its own, then its parent's up to the fork, and
    so on.
    """
    refs: dict[int, CheckpointRef] = {}
    limit: int | None = None
    name: str | None = run
    seen: set[str] = set()
    while name is not None and name not in seen:
        seen.add(name)
        for step in history.steps(name):
            if limit is None or step <= limit:
                refs.setdefault(step, CheckpointRef(name, step))
        facts = history.run_facts(name)
        if facts.parent_step is not None:
            limit = facts.parent_step if limit is None else min(limit, facts.parent_step)
        name = facts.parent_run
        if name is not None and not history.paths.run_json(name).exists():
            name = None
    return [refs[step] for step in sorted(refs)]


def committed_lineage(history: History, run: str | None = None) -> list[CheckpointRef]:
    """The same of a run, by default the current one. NotFoundError when there is none yet."""
    run = run or history.current_run()
    refs = lineage(history, run)
    if not refs:
        raise NotFoundError(f"run {run} of {history.root} has no committed checkpoint yet")
    return refs


def resolve(history: History, ref: int | str | CheckpointRef) -> CheckpointRef:
    """The committed checkpoint that `ref` names; NotFoundError names the nearest that exist, SetupError what is no
    reference at all.
    """
    if isinstance(ref, CheckpointRef):
        return _in_run(history, ref.run, ref.step)
    if not isinstance(ref, str):
        ref = _number(ref)
    if isinstance(ref, str) and ":" in ref:
        run, _, step = ref.rpartition(":")
        return _of_run(history, run, step)
    if isinstance(ref, str) and ref.lstrip("-").isdigit():
        ref = int(ref)
    if ref in ("latest", -1):
        return committed_lineage(history)[-1]
    if isinstance(ref, int):
        return _in_lineage(history, ref)
    if ref == "best":
        return _best(history, committed_lineage(history))
    return _tagged(history, ref)


def _number(ref: object) -> int:
    if not isinstance(ref, bool):
        try:
            return operator.index(ref)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise SetupError(
        f"a checkpoint is named by a step (int), 'run:step', a tag, 'latest', 'best' or -1, not by {ref!r} of type "
        f"{type(ref).__qualname__}"
    )


def _in_lineage(history: History, step: int) -> CheckpointRef:
    refs = committed_lineage(history)
    if step < 0:
        if -step > len(refs):
            raise NotFoundError(
                f"checkpoint {step} from the end: {history.root} has only {len(refs)} of the current run"
            )
        return refs[step]
    found = next((ref for ref in refs if ref.step == step), None)
    if found is None:
        raise NotFoundError(f"step {step} was not captured in {history.root}: {_nearest(refs, step)}")
    return found


def _of_run(history: History, run: str, which: str) -> CheckpointRef:
    """Among a run's own checkpoints: a step, -1 and further back, "latest" or "best"."""
    if which not in ("latest", "best"):
        return _in_run(history, run, _whole(which, f"{run}:{which}"))
    history.run_facts(run)
    refs = [CheckpointRef(run, step) for step in history.steps(run)]
    if not refs:
        raise NotFoundError(f"run {run} of {history.root} has no committed checkpoint yet")
    return refs[-1] if which == "latest" else _best(history, refs)


def _in_run(history: History, run: str, step: int) -> CheckpointRef:
    history.run_facts(run)
    steps = history.steps(run)
    if step < 0 and steps:
        if -step > len(steps):
            raise NotFoundError(f"checkpoint {step} from the end: run {run} of {history.root} has only {len(steps)}")
        return CheckpointRef(run, steps[step])
    if step not in steps:
        refs = [CheckpointRef(run, other) for other in steps]
        raise NotFoundError(f"step {step} was not captured in run {run} of {history.root}: {_nearest(refs, step)}")
    return CheckpointRef(run, step)


def _nearest(refs: list[CheckpointRef], step: int) -> str:
    if not refs:
        return "it has no committed checkpoint"
    below = max((ref.step for ref in refs if ref.step < step), default=None)
    above = min((ref.step for ref in refs if ref.step > step), default=None)
    near = " and ".join(str(other) for other in (below, above) if other is not None)
    return f"the nearest are {near}" if below is not None and above is not None else f"the nearest is {near}"


def _whole(text: str, ref: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise NotFoundError(
            f"{ref!r}: after the last ':' a step is expected, 'latest' or 'best', not {text!r}"
        ) from error


def _best(history: History, refs: list[CheckpointRef]) -> CheckpointRef:
    """The one of these with the least loss, the earliest of equal ones."""
    rows = history.query("SELECT run, step, value FROM metrics WHERE name = 'loss' AND NOT isnan(value)").to_pylist()
    losses = {CheckpointRef(row["run"], row["step"]): row["value"] for row in rows}
    known = [ref for ref in refs if ref in losses]
    if not known:
        raise NotFoundError(
            f"no captured step of run {refs[-1].run} of {history.root} has a recorded loss, so there is no 'best': name a step, or record one with session.log(loss=...)"
        )
    return min(known, key=lambda ref: (losses[ref], ref.step))


def _tagged(history: History, tag: str) -> CheckpointRef:
    rows = history.query("SELECT name, run, step FROM tags ORDER BY time").to_pylist()
    tags = {row["name"]: CheckpointRef(row["run"], row["step"]) for row in rows}
    if tag not in tags:
        if tag in run_names(history.paths):
            raise NotFoundError(f"{tag!r} is a run of {history.root}: say which checkpoint, as {f'{tag}:latest'!r}")
        close = difflib.get_close_matches(tag, [*tags, "latest", "best"], n=3) or sorted(tags)[:5]
        hint = f"the nearest are {', '.join(close)}" if close else "it has no tags"
        raise NotFoundError(
            f"{tag!r} is neither a step, 'latest', 'best', 'run:step' nor a tag of {history.root}: {hint}"
        )
    found = tags[tag]
    return _in_run(history, found.run, found.step)
