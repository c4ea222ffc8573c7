"""The log of checkpoints: metrics, bytes, state and health, from the catalog by one query for all of them."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from catalog.damage import damaged_checkpoints, needs_of
from catalog.data_files.data_files import packed_bytes
from catalog.history import History
from catalog.read.redo import recorded_steps
from catalog.records import CheckpointRef
from dshistory.display.formats import Format, counted
from dshistory.display.table import Table
from dshistory.display.text import Layout
from dshistory.patterns import Patterns, matching

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from catalog.index.registered import Gone

__all__ = ["LogTable", "log"]

_FORMATS: Final[Mapping[str, Format]] = {
    "bytes": "bytes",
    "new_bytes": "bytes",
    "step_time_s": "seconds",
    "health": "known",
}
_LAYOUT: Final = Layout(in_title=("run",), gives_way=("created", "new_bytes", "step_time_s", "state", "run"))
_OWN_METRICS_SHOWN: Final = 8
"""The number of user-defined metrics that get a column; the SQL table `metrics` has all of them."""

_GONE_SHOWN: Final = 5

_LOG: Final = """
SELECT c.step, c.run, c.created, m.loss, m.lr, m.grad_norm, m.step_time_s, m.own, c.bytes, c.new_bytes, c.state,
    CASE WHEN h.run IS NULL THEN NULL WHEN h.tensors = 0 THEN 'ok' ELSE
        concat_ws(', ', CASE WHEN h.nan > 0 THEN h.nan || ' NaN' END, CASE WHEN h.inf > 0 THEN h.inf || ' Inf' END)
        || ' in ' || h.tensors || CASE h.tensors WHEN 1 THEN ' tensor' ELSE ' tensors' END
    END AS health,
    t.tags
FROM checkpoints c
LEFT JOIN (
    SELECT run, step,
        any_value(value) FILTER (name = 'loss') AS loss,
        any_value(value) FILTER (name = 'lr') AS lr,
        any_value(value) FILTER (name = 'grad_norm') AS grad_norm,
        any_value(value) FILTER (name = 'step_time_s') AS step_time_s,
        list({'name': name, 'value': value})
            FILTER (name NOT IN ('loss', 'lr', 'grad_norm', 'step_time_s', 'applied', 'stall_s')) AS own
    FROM metrics GROUP BY run, step
) m USING (run, step)
LEFT JOIN (
    SELECT run, step, sum(nan)::BIGINT AS nan, coalesce(sum(inf) FILTER (kind <> 'buffer'), 0)::BIGINT AS inf,
        count(*) FILTER (nan > 0 OR (inf > 0 AND kind <> 'buffer')) AS tensors
    FROM statistics GROUP BY run, step
) h USING (run, step)
LEFT JOIN (
    SELECT run, step, string_agg(name, ', ' ORDER BY name) AS tags FROM tags GROUP BY run, step
) t USING (run, step)
JOIN runs r USING (run)
WHERE $run IS NULL OR c.run = $run
ORDER BY r.created, c.run, c.step
"""
_LOSSES: Final = """
SELECT m.run, m.step, m.value FROM metrics m JOIN runs r USING (run)
WHERE m.name = 'loss' AND ($run IS NULL OR m.run = $run) ORDER BY r.created, m.run, m.step
"""


_REMOVED: Final = """
SELECT count(DISTINCT (e.run, e.step)) AS count
FROM events e ANTI JOIN checkpoints c ON c.run = e.run AND c.step = e.step
WHERE e.name = 'removed' AND ($run IS NULL OR e.run = $run)
"""


class LogTable(Table):
    """The checkpoints of a history; `losses` (run, step, value) has the loss of every step."""

    history: History
    run: str | None

    @cached_property
    def losses(self) -> Table:
        """The loss of every step, read from the history at the first access."""
        return Table(self.history.query(_LOSSES, {"run": self.run}))

    def plot(self) -> "go.Figure":
        """Plot the loss of every step, with marks at the checkpoints. Needs the [notebook] extra."""
        from dshistory.display import plot

        return plot.loss_timeline(self.losses, self)


def log(history: History, *, run: str | None, metrics: Patterns | None) -> LogTable:
    """See `Explorer.log`."""
    if run is not None:
        history.run_facts(run)
    gone = [lost for lost in history.gone() if run is None or lost.run == run]
    with history.asking() as ask:
        listed = ask(_LOG, {"run": run})
        removed = int(ask(_REMOVED, {"run": run})["count"][0].as_py())
        needs = needs_of(ask, run)
    damaged = damaged_checkpoints(history.paths, needs)
    found = _with_damage(_with_gone(_with_packed(history, listed), gone), damaged)
    rows, left_out = _with_own_metrics(found, metrics, where=f"the log of {history.root}")
    note = _note(history, rows, left_out, gone, damaged, removed)
    table = LogTable(rows, formats=_FORMATS, note=note, layout=_LAYOUT)
    table.history, table.run = history, run
    return table


def _with_own_metrics(found: pa.Table, metrics: Patterns | None, *, where: str) -> tuple[pa.Table, list[str]]:
    """Replace the lists of user-defined metrics by columns: those that match, or the first few. Where nobody has
    chosen, return the names without a column too."""
    at = found.column_names.index("own")
    lists = found["own"].combine_chunks()
    pairs, rows = pc.list_flatten(lists), pc.list_parent_indices(lists).to_numpy()
    names, values = pairs.field("name"), pairs.field("value").to_numpy(zero_copy_only=False)
    table = found.remove_column(at)
    known = sorted(names.unique().to_pylist(), key=lambda name: (name in table.column_names, name))
    if metrics is None:
        shown = [name for name in known[:_OWN_METRICS_SHOWN] if name not in table.column_names]
    else:
        own = [name for name in known if name not in table.column_names]
        chosen = matching({*own, *table.column_names}, metrics, what="metric", where=where)
        shown = [name for name in own if name in chosen]
    for place, name in enumerate(shown):
        of_name = pc.equal(names, name).to_numpy(zero_copy_only=False)
        column, unknown = np.zeros(len(found)), np.ones(len(found), bool)
        column[rows[of_name]], unknown[rows[of_name]] = values[of_name], False
        table = table.add_column(at + place, name, pa.array(column, mask=unknown))
    return table, [] if metrics is not None else [name for name in known if name not in shown]


def _with_packed(history: History, found: pa.Table) -> pa.Table:
    """Return the rows with what packed checkpoints take now as their new bytes."""
    keys = zip(found["run"].to_pylist(), found["step"].to_pylist(), strict=True)
    packed = (packed_bytes(history.paths, CheckpointRef(*key)) for key in keys)
    taken = [now or written for now, written in zip(packed, found["new_bytes"].to_pylist(), strict=True)]
    return found.set_column(found.column_names.index("new_bytes"), "new_bytes", pa.array(taken, pa.int64()))


def _with_gone(found: pa.Table, gone: "Sequence[Gone]") -> pa.Table:
    """Return the rows with the state `failed` where the marker of a registered checkpoint is gone."""
    lost = {(one.run, one.step) for one in gone}
    if not lost:
        return found
    keys = zip(found["run"].to_pylist(), found["step"].to_pylist(), strict=True)
    states = ["failed" if key in lost else state for key, state in zip(keys, found["state"].to_pylist(), strict=True)]
    return found.set_column(found.column_names.index("state"), "state", pa.array(states, pa.string()))


def _with_damage(found: pa.Table, damaged: Mapping[CheckpointRef, str]) -> pa.Table:
    """Return the rows with what is missing as the health of those whose bytes are gone."""
    if not damaged:
        return found
    keys = zip(found["run"].to_pylist(), found["step"].to_pylist(), strict=True)
    healths = [
        f"damaged: {damaged[CheckpointRef(*key)]}" if CheckpointRef(*key) in damaged else health
        for key, health in zip(keys, found["health"].to_pylist(), strict=True)
    ]
    return found.set_column(found.column_names.index("health"), "health", pa.array(healths, pa.string()))


def _redo_note(history: History, rows: pa.Table) -> list[str]:
    """Say how many steps between the checkpoints are in redo logs."""
    captured = set(zip(rows["run"].to_pylist(), rows["step"].to_pylist(), strict=True))
    runs = {run for run, _ in captured}
    recorded = {(run, step) for run in runs for step in recorded_steps(history.paths, run)}
    count = len(recorded - captured)
    taken = "which `restore`, `replay`, `tensor`, `diff`, `audit`, `export` and `evaluate` take too"
    return [f"and {counted(count, 'redo step')} between, {taken}"] if count else []


def _gone_note(gone: "Sequence[Gone]") -> list[str]:
    steps = [f"{lost.run}:{lost.step}" for lost in gone if lost.step is not None]
    files = [str(lost.path) for lost in gone if lost.step is None]
    parts = []
    if steps:
        parts.append(f"registered, but its marker is gone: {_first(steps)}")
    if files:
        parts.append(f"registered, but it is gone: {_first(files)}")
    return [*parts, "`verify` says what to do"] if parts else []


def _first(names: list[str]) -> str:
    return ", ".join(names[:_GONE_SHOWN]) + (f" and {len(names) - _GONE_SHOWN} more" if names[_GONE_SHOWN:] else "")


def _note(
    history: History,
    rows: pa.Table,
    left_out: list[str],
    gone: "Sequence[Gone]",
    damaged: Mapping[CheckpointRef, str],
    removed: int,
) -> str:
    earlier = [f"{removed} more were removed: `sql` has the events"] if removed else []
    if not rows.num_rows:
        return "; ".join([f"no checkpoint yet in {history.root}", *earlier, *_gone_note(gone)])
    parts = [counted(rows.num_rows, "checkpoint"), *earlier, *_redo_note(history, rows), *_gone_note(gone)]
    if damaged:
        parts.append(f"{len(damaged)} damaged: bytes that they need are gone, so they can't be restored")
    committed = pc.equal(rows["state"], "committed")
    unknown = rows.filter(committed)["health"].null_count
    if unknown:
        parts.append(f"health is unknown (?) for {unknown} without statistics: `analyze` computes them")
    if left_out:
        parts.append(f"further metrics are in the SQL table metrics: {', '.join(left_out)}")
    return "; ".join(parts)
