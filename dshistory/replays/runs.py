"""The runs of a history as a tree: where each forked from its parent, what was changed, and what came of it."""

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.records import RunFacts
from dshistory.display.formats import counted
from dshistory.display.table import Table

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["RunsTable", "runs"]

_SCHEMA: Final = pa.schema(
    [
        ("tree", pa.string()),
        ("run", pa.string()),
        ("parent", pa.string()),
        ("kind", pa.string()),
        ("changed", pa.string()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("checkpoints", pa.int64()),
        ("loss", pa.float64()),
        ("lowest_loss", pa.float64()),
        ("state", pa.string()),
    ]
)

_LOSSES: Final = """
SELECT run, max(step) AS last, arg_max(value, step) AS loss, min(value) FILTER (NOT isnan(value)) AS lowest
FROM metrics WHERE name = 'loss' GROUP BY run
"""
_CLOSED: Final = "SELECT DISTINCT run FROM events WHERE name = 'closed'"


class RunsTable(Table):
    """A row for each run, a parent before its children. `tree` draws the forks; `loss` is that of the last step."""

    def plot(self) -> "go.Figure":
        """Draw the tree: a line for each run over its steps, from where it forked. Needs the [notebook] extra."""
        from dshistory.display import plot

        return plot.tree_of_runs(list(self))


def runs(history: History) -> RunsTable:
    """See `Explorer.runs`."""
    every = {facts.run: facts for facts in history.runs()}
    current = _current(history)
    losses = {row["run"]: row for row in history.query(_LOSSES).to_pylist()}
    closed = set(history.query(_CLOSED)["run"].to_pylist())
    children: dict[str | None, list[RunFacts]] = {}
    for facts in every.values():
        children.setdefault(facts.parent_run if facts.parent_run in every else None, []).append(facts)
    rows: list[dict[str, Any]] = []

    def add(facts: RunFacts, indent: str, branch: str, seen: frozenset[str]) -> None:
        tree = f"{indent}{branch}{'*' if facts.run == current else 'o'}"
        rows.append({"tree": tree, **_row(history, facts, losses.get(facts.run, {}), closed)})
        below = [child for child in children.get(facts.run, []) if child.run not in seen]
        inner = indent + {"": "", "├─": "│ ", "└─": "  "}[branch]
        for place, child in enumerate(below):
            add(child, inner, "└─" if place == len(below) - 1 else "├─", seen | {child.run})

    # Runs of a damaged history that are each other's ancestors hang from no root.
    for root in [*children.get(None, []), *every.values()]:
        if not any(row["run"] == root.run for row in rows):
            add(root, "", "", frozenset({root.run}))
    note = f"{counted(len(rows), 'run')}; * is the current one, to which plain steps refer" if rows else "no run yet"
    return RunsTable(pa.Table.from_pylist(rows, schema=_SCHEMA), note=note)


def _current(history: History) -> str | None:
    try:
        return history.current_run()
    except NotFoundError:
        return None


def _row(history: History, facts: RunFacts, losses: Mapping[str, Any], closed: Set[str]) -> dict[str, Any]:
    steps = history.steps(facts.run)
    replay = facts.facts.get("replay")
    return {
        "run": facts.run,
        "parent": None if facts.parent_run is None else f"{facts.parent_run}:{facts.parent_step}",
        "kind": "replay" if replay else "import" if facts.facts.get("imported") else "training",
        "changed": _changed(replay) if isinstance(replay, dict) else None,
        "first": min(steps, default=None),
        "last": max([*steps, *([losses["last"]] if losses else [])], default=None),
        "checkpoints": len(steps),
        "loss": losses.get("loss"),
        "lowest_loss": losses.get("lowest"),
        "state": _state(history, facts, closed),
    }


def _state(history: History, facts: RunFacts, closed: Set[str]) -> str:
    if history.held(facts.run):
        return "being written"
    return "ended" if facts.run in closed or facts.facts.get("imported") else "cut off"


def _changed(replay: Mapping[str, Any]) -> str:
    change = replay.get("change") or {}
    return ", ".join(f"{name} {value}" for name, value in change.items()) or "nothing"
