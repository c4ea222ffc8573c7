"""The data of the explorer's timeline: a metric step by step, the checkpoints on it, and the anomalies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from catalog.history import History
from catalog.records import CheckpointRef
from catalog.references import generations, lineage
from dshistory.display.table import Table
from dshistory.trends.metric_anomalies import METRIC

__all__ = ["Timeline", "anomalies_by_step", "metric_query", "read_timeline"]


@dataclass(frozen=True)
class Timeline:
    """The checkpoints of a run and its parents, and the names of their metrics and kinds of tensors."""

    run: str | None
    refs: Sequence[CheckpointRef]
    metrics: Sequence[str]
    kinds: Sequence[str]


def read_timeline(history: History, run: str | None) -> Timeline:
    """Return the timeline of a run, by default the current one; that of a history without runs is empty.

    Raises NotFoundError for a run that does not exist."""
    if run is None:
        if not history.runs():
            return Timeline(None, [], [], [])
        run = history.current_run()
    history.run_facts(run)
    refs = lineage(history.paths, run)
    runs = {"runs": sorted({run, *(ref.run for ref in refs)})}
    metrics = history.query("SELECT DISTINCT name FROM metrics WHERE list_contains($runs, run) ORDER BY name", runs)
    return Timeline(run, refs, metrics["name"].to_pylist(), _kinds(history, refs[-1]) if refs else [])


def _kinds(history: History, ref: CheckpointRef) -> list[str]:
    sql = "SELECT DISTINCT kind FROM tensors WHERE run = $run AND step = $step ORDER BY kind"
    kinds: list[str] = history.query(sql, {"run": ref.run, "step": ref.step})["kind"].to_pylist()
    return kinds


def metric_query(history: History, run: str, name: str) -> tuple[str, Mapping[str, str]]:
    """Return the SQL, and its parameters, for a metric at every step of a run and of its parents up to the forks."""
    parts: list[str] = []
    params = {"name": name}
    for number, (one, limit) in enumerate(generations(history.paths, run)):
        params[f"run{number}"] = one
        parts.append(f"run = $run{number}" + ("" if limit is None else f" AND step <= {limit}"))
    where = parts[0] if len(parts) == 1 else " OR ".join(f"({part})" for part in parts)
    return f"SELECT run, step, value FROM metrics WHERE name = $name AND ({where}) ORDER BY step", params


def anomalies_by_step(rows: Table) -> Mapping[int, Sequence[str]]:
    """Return a line of text for each anomaly of a tensor, by step: a metric is drawn itself."""
    found: dict[int, list[str]] = {}
    for row in (row for row in rows if row["kind"] != METRIC):
        found.setdefault(row["step"], []).append(f"{row['anomaly']}: {row['name']} ({row['kind']})")
    return found
