"""A metric computed afterwards over checkpoints: each is loaded into the model in turn, measured, and stored.

    checkpoints that do not have it yet  ->  the model, here or in worker processes  ->  `fn(model)`  ->  the journal

A value is stored as soon as it is there, so an evaluation that ends early, however it ends, goes on where it stopped.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import torch

from catalog.errors import SetupError
from catalog.history import History
from catalog.index import index
from catalog.later_metrics import LaterMetrics, later_metrics
from catalog.records import CheckpointRef
from dshistory.display.formats import counted
from dshistory.display.progress import CountProgress
from dshistory.display.table import Table
from dshistory.display.text import Layout
from dshistory.hindsight.measuring import Attempts, Failure, Measured
from dshistory.hindsight.worker_processes import measured_by_workers
from dshistory.tensors.borrowed_model import BorrowedModel

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["EvaluationTable", "evaluate"]

_SCHEMA: Final = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int64()),
        ("name", pa.string()),
        ("value", pa.float64()),
        ("computed", pa.bool_()),
        ("error", pa.string()),
    ]
)
_LAYOUT: Final = Layout(in_title=("run",), gives_way=("computed", "run"))
_HOPELESS: Final = 3
"""After so many checkpoints that all have failed there is no use in going on."""

_PATIENCE_S: Final = 2.0


class EvaluationTable(Table):
    """A row for each checkpoint and metric, in the order asked: its value, and whether it was computed now; or the
    error of a checkpoint whose evaluation failed."""

    @property
    def failed(self) -> "EvaluationTable":
        """The rows of checkpoints that failed."""
        return self._of(self.to_arrow().filter(self.to_arrow()["error"].is_valid()))

    def plot(self) -> "go.Figure":
        """Draw the values over the steps, a line for each metric and run. Needs the [notebook] extra."""
        from dshistory.display import plot

        return plot.curves(self, x="step", empty="no checkpoint was measured")


def evaluate(
    history: History,
    fn: Callable[[Any], Any],
    refs: Sequence[CheckpointRef],
    *,
    name: str | None,
    model: torch.nn.Module,
    weights: str,
    workers: int,
    again: bool,
    quiet: bool,
) -> EvaluationTable:
    """See `Explorer.evaluate`."""
    if not callable(fn):
        raise SetupError(f"evaluate: fn={fn!r}: give a function of the model that returns a number")
    if workers < 1:
        raise SetupError(f"evaluate: workers={workers}: give the number of processes, at least 1")
    if name == "":
        raise SetupError("evaluate: name='': give the metric a name, or None to store nothing")
    stored = {} if name is None else _stored(history, refs, name)
    known = {} if again else {ref: stored[ref] for ref in refs if ref in stored}
    runs = list(dict.fromkeys(ref.run for ref in refs))
    # In the order in which steps of a redo log follow from each other.
    missing = sorted((ref for ref in refs if ref not in known), key=lambda ref: (runs.index(ref.run), ref.step))
    found: dict[CheckpointRef, Measured | Failure] = {}
    outcomes = (
        _measured_here(history, fn, missing, model=model, weights=weights)
        if workers == 1
        else measured_by_workers(history.root, fn, missing, model=model, weights=weights, workers=workers)
    )
    recorder: AbstractContextManager[LaterMetrics | None] = (
        nullcontext() if name is None else LaterMetrics(history.paths)
    )
    try:
        with (
            recorder as metrics,
            closing(outcomes),
            CountProgress(len(missing), description=f"evaluate {len(missing)} checkpoints", quiet=quiet) as bar,
        ):
            for ref, outcome in outcomes:
                found[ref] = outcome
                if metrics is not None and name is not None and not isinstance(outcome, Failure):
                    metrics.record(ref, _named(name, outcome))
                bar.advance(1)
                _require_hope(found, len(missing))
    except OSError as error:
        raise SetupError(
            f"evaluate: the metric {name!r} cannot be written into {history.root}: {error.strerror}; free space, get "
            "write permission, or pass name=None, which stores nothing"
        ) from error
    if name is not None and found:
        index.register(history.paths, patience_s=_PATIENCE_S)
    return _table(refs, known, found, name or "value")


def _measured_here(
    history: History, fn: Callable[[Any], Any], refs: Sequence[CheckpointRef], *, model: torch.nn.Module, weights: str
) -> Generator[tuple[CheckpointRef, Measured | Failure]]:
    with (
        BorrowedModel(model, verb="evaluate") as borrowed,
        closing(Attempts(history, fn, borrowed, weights=weights)) as attempts,
    ):
        for ref in refs:
            yield ref, attempts.attempt(ref)


def _stored(history: History, refs: Sequence[CheckpointRef], name: str) -> dict[CheckpointRef, dict[str, float]]:
    """Return what earlier evaluations have stored under the name, or under names inside of it. SetupError when the
    training has recorded a metric of that name itself, with which values would be mixed."""
    runs = sorted({ref.run for ref in refs})
    later = later_metrics(history.paths, runs)
    mine = {
        ref: of_name
        for ref, values in later.items()
        if (of_name := {key: value for key, value in values.items() if key == name or key.startswith(f"{name}/")})
    }
    sql = (
        "SELECT run, step, name FROM metrics WHERE list_contains($runs, run) AND (name = $name OR "
        "starts_with(name, $name || '/')) ORDER BY run, step"
    )
    for row in history.query(sql, {"runs": runs, "name": name}).to_pylist():
        ref = CheckpointRef(row["run"], row["step"])
        if row["name"] not in mine.get(ref, {}):
            raise SetupError(
                f"evaluate: name={name!r}: the training has recorded {row['name']!r} itself, at {ref}: "
                "choose another name"
            )
    return mine


def _named(name: str, values: Measured) -> dict[str, float]:
    """Return metrics by name: those of a dict are called `name/key`."""
    if isinstance(values, dict):
        return {f"{name}/{key}": value for key, value in values.items()}
    return {name: values}


def _require_hope(found: Mapping[CheckpointRef, Measured | Failure], total: int) -> None:
    """Raise SetupError when all of the first checkpoints have failed: then the function is wrong, not a checkpoint."""
    failures = [(ref, outcome) for ref, outcome in found.items() if isinstance(outcome, Failure)]
    if len(failures) == len(found) == min(_HOPELESS, total):
        ref, failure = failures[0]
        raise SetupError(
            f"evaluate: all of the first {counted(len(failures), 'checkpoint')} failed, the first, {ref}, with "
            f"{failure.message}"
        ) from failure.error


def _table(
    refs: Sequence[CheckpointRef],
    known: Mapping[CheckpointRef, Mapping[str, float]],
    found: Mapping[CheckpointRef, Measured | Failure],
    name: str,
) -> EvaluationTable:
    rows: list[dict[str, Any]] = []
    failures = 0
    for ref in refs:
        row = {"run": ref.run, "step": ref.step, "computed": ref in found}
        outcome = found.get(ref)
        if isinstance(outcome, Failure):
            failures += 1
            rows.append(row | {"name": name, "error": outcome.message})
            continue
        values = known[ref] if outcome is None else _named(name, outcome)
        rows += [row | {"name": key, "value": value} for key, value in sorted(values.items())]
    parts = [f"{counted(len(found) - failures, 'checkpoint')} measured"]
    parts += [f"{len(known)} had it already (again=True computes it anew)"] if known else []
    parts += [f"{failures} failed: .failed shows them, the next call tries them again"] if failures else []
    return EvaluationTable(pa.Table.from_pylist(rows, schema=_SCHEMA), note="; ".join(parts), layout=_LAYOUT)
