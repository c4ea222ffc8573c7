"""The first checkpoint at which a predicate holds: a binary search over a run's lineage, like git bisect.

Both ends are evaluated first and must differ. Each further checkpoint halves the range at whose ends the answers
differ, until two neighbours are left: the predicate does not hold at the one and holds at the other.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from catalog.errors import MismatchError, NotFoundError, SetupError
from catalog.history import History
from catalog.nearest_names import nearest
from catalog.records import CheckpointRef
from catalog.references import committed_lineage
from dshistory.display.formats import counted
from dshistory.display.progress import CountProgress
from dshistory.display.table import Table
from dshistory.options import Predicate
from dshistory.user_functions import whether

if TYPE_CHECKING:
    import torch


__all__ = ["Bisection", "Checkpoint", "bisect"]

Value = bool | float
Evaluate = Callable[[CheckpointRef], Value]

_EXPRESSION: Final = re.compile(r"\s*(?P<metric>[^<>=\s]+)\s*(?P<sign><=|>=|<|>)\s*(?P<number>[^<>=\s]+)\s*")
_OPPOSITES: Final = MappingProxyType({"<": ">=", "<=": ">", ">": "<=", ">=": "<"})
_SIGNS: Final = MappingProxyType({"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge})
_SCHEMA: Final = pa.schema([("run", pa.string()), ("step", pa.int64()), ("holds", pa.bool_()), ("value", pa.float64())])


class Checkpoint:
    """One checkpoint as a predicate sees it; each property reads only when it is used."""

    def __init__(self, history: History, ref: CheckpointRef) -> None:
        self._history = history
        self.ref = ref

    def __repr__(self) -> str:
        return f"<Checkpoint: {self.ref} in {self._history.root}>"

    @property
    def run(self) -> str:
        """The run that wrote the checkpoint."""
        return self.ref.run

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.ref.step

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """The metrics that the training recorded at this step, by name: loss, lr, grad_norm, ..."""
        sql = "SELECT name, value FROM metrics WHERE run = $run AND step = $step"
        rows = self._history.query(sql, {"run": self.run, "step": self.step}).to_pylist()
        return {row["name"]: row["value"] for row in rows}

    def tensor(self, name: str, *, state: str = "model") -> "torch.Tensor":
        """Return one logical tensor in its global shape; reads only its own bytes and verifies them."""
        from dshistory.comparison import diff

        return diff.tensor(self._history, self.ref, name=name, kind=state)

    def state_dict(self) -> dict[str, "torch.Tensor"]:
        """Return weights and buffers as `module.load_state_dict` takes them, tied names included."""
        from dshistory.tensors.checkpoint_tensors import CheckpointTensors

        stored = CheckpointTensors(self._history, self.ref, advance=lambda nbytes: None)
        state = {name: stored.whole(tensor) for name, tensor in stored.state_dict("model").items()}
        return state | {alias: state[name] for alias, name in stored.aliases().items()}


class Bisection(Table):
    """A row for each evaluated checkpoint, in that order: `holds` is the answer, and `value` that of the metric where
    the predicate is about one."""

    first: CheckpointRef
    """The first checkpoint at which the predicate holds; `h.diff(found.before, found.first)` compares the two."""

    before: CheckpointRef
    """The checkpoint right before it, at which the predicate does not hold."""


def bisect(
    history: History,
    predicate: Predicate,
    *,
    good: CheckpointRef | int | str | None,
    bad: CheckpointRef | int | str | None,
    model: Any,
    run: str | None,
    quiet: bool,
) -> Bisection:
    """See `Explorer.bisect`."""
    if model is not None and isinstance(predicate, str):
        raise SetupError(
            f"bisect: {predicate!r} is about a metric, which needs no model=: give a function of the model"
        )
    run = run or history.current_run()
    path = committed_lineage(history.paths, run)
    if isinstance(predicate, str):
        values, holds = _of_metric(history, path, predicate)
        path = [ref for ref in path if ref in values]
        evaluate: Evaluate = values.__getitem__
    elif model is None:
        evaluate, holds = _answering(predicate, lambda ref: Checkpoint(history, ref)), bool
    else:
        evaluate, holds = _of_model(history, predicate, model), bool
    if len(path) < 2:
        raise NotFoundError(
            f"bisect: run {run} of {history.root} has {counted(len(path), 'checkpoint')} to ask; it takes two"
        )
    low = 0 if good is None else _place(history, path, good, run=run, what="good")
    high = len(path) - 1 if bad is None else _place(history, path, bad, run=run, what="bad")
    if low >= high:
        raise SetupError(f"bisect: good={path[low]} must come before bad={path[high]}")
    asked = path[low : high + 1]
    elsewhere = _in_metrics(asked, values, holds) if isinstance(predicate, str) else ""
    answers = _search(path, low, high, evaluate=evaluate, holds=holds, elsewhere=elsewhere, quiet=quiet)
    return _table(asked, answers, holds, valued=isinstance(predicate, str))


def _search(
    path: Sequence[CheckpointRef],
    low: int,
    high: int,
    *,
    evaluate: Evaluate,
    holds: Callable[[Value], bool],
    elsewhere: str,
    quiet: bool,
) -> dict[CheckpointRef, Value]:
    """Evaluate both ends, then halve the range until two neighbours are left; return the answers in that order.
    `elsewhere` says, for an end that does not fit, where the predicate holds.
    """
    answers: dict[CheckpointRef, Value] = {}
    with CountProgress(2 + math.ceil(math.log2(high - low)), description="bisect", quiet=quiet) as bar:

        def at(place: int) -> bool:
            ref = path[place]
            answers[ref] = evaluate(ref)
            bar.advance(1)
            return holds(answers[ref])

        _require_ends(at(low), at(high), answers, elsewhere)
        while high - low > 1:
            middle = (low + high) // 2
            if at(middle):
                high = middle
            else:
                low = middle
    return answers


def _require_ends(at_good: bool, at_bad: bool, answers: Mapping[CheckpointRef, Value], elsewhere: str) -> None:
    if at_bad and not at_good:
        return
    (good, value_at_good), (bad, value_at_bad) = answers.items()
    problem = (
        f"bisect: at good={good} the predicate gives {_text(value_at_good)}, at bad={bad} {_text(value_at_bad)}: "
        "it must hold at the bad end only; "
    )
    if at_good and at_bad:
        raise MismatchError(f"{problem}choose an earlier good=")
    if at_good:
        raise MismatchError(f"{problem}ask for the opposite")
    raise MismatchError(f"{problem}choose a later bad=, or a predicate that holds there{elsewhere}")


def _in_metrics(
    asked: Sequence[CheckpointRef], values: Mapping[CheckpointRef, float], holds: Callable[[Value], bool]
) -> str:
    """Return where the predicate holds first in the metrics, which have the steps between the checkpoints too; empty
    where it holds nowhere.
    """
    # A run ends for the lineage at its last checkpoint in it, where the next run was forked.
    for before, after in pairwise(asked):
        between = sorted(ref.step for ref in values if ref.run == after.run and before.step < ref.step <= after.step)
        for step in between:
            value = values[CheckpointRef(after.run, step)]
            if not math.isnan(value) and holds(value):
                return (
                    f"; in the metrics, which have every step, it holds first at step {step} of run {after.run} "
                    f"({_text(value)}), after the checkpoint {before}: compare it with {after}"
                )
    return ""


def _text(value: Value) -> str:
    return str(value) if isinstance(value, bool) else f"{value:.4g}"


def _table(
    path: Sequence[CheckpointRef],
    answers: Mapping[CheckpointRef, Value],
    holds: Callable[[Value], bool],
    *,
    valued: bool,
) -> Bisection:
    first = next(ref for ref in path if ref in answers and holds(answers[ref]))
    before = path[path.index(first) - 1]
    rows = [
        {"run": ref.run, "step": ref.step, "holds": holds(value), "value": value if valued else None}
        for ref, value in answers.items()
    ]
    data = pa.Table.from_pylist(rows, schema=_SCHEMA)
    note = (
        f"not yet at {before}, but at {first}; {len(answers)} of {counted(len(path), 'checkpoint')} asked. "
        "It is the first, if from there on the predicate holds at all of them"
    )
    table = Bisection(data if valued else data.drop_columns("value"), note=note)
    table.first, table.before = first, before
    return table


def _place(
    history: History, path: Sequence[CheckpointRef], ref: CheckpointRef | int | str, *, run: str, what: str
) -> int:
    """Return the index of an end in the path; a step means that of the path, in whichever run, and -1 its last."""
    steps = [one.step for one in path]
    hint = ""
    if isinstance(ref, int):
        step = steps[ref] if -len(steps) <= ref < 0 else ref
        if step in steps:
            return steps.index(step)
        hint = f"; the nearest are {' and '.join(map(str, sorted(sorted(steps, key=lambda one: abs(one - step))[:2])))}"
    elif (found := history.resolve(ref)) in path:
        return path.index(found)
    raise NotFoundError(
        f"bisect: {what}={ref} is none of the {len(path)} checkpoints to ask, {path[0]} to {path[-1]}, "
        f"of run {run} and its parents{hint}"
    )


def _of_model(history: History, predicate: Callable[[Any], Any], model: Any) -> Evaluate:
    """Return the predicate on the model as a function of a ref, whose weights the model has meanwhile."""
    from dshistory.tensors.borrowed_model import BorrowedModel

    def evaluate(ref: CheckpointRef) -> Value:
        with BorrowedModel(model, verb="bisect") as borrowed:
            return _answering(predicate, lambda ref: borrowed.load_checkpoint(history, ref))(ref)

    return evaluate


def _answering(predicate: Callable[[Any], Any], subject: Callable[[CheckpointRef], Any]) -> Evaluate:
    """Return the predicate on what `subject` gives for a ref as a function of the ref; its errors, and an answer of
    None, become SetupErrors that name the checkpoint."""
    if not callable(predicate):
        raise SetupError(
            f"bisect: the predicate is a function of a checkpoint, or text as 'loss > 4.5', not {predicate!r}"
        )

    def evaluate(ref: CheckpointRef) -> bool:
        return whether(predicate, lambda: subject(ref), verb="bisect", at=f"checkpoint {ref}")

    return evaluate


def _of_metric(
    history: History, path: Sequence[CheckpointRef], text: str
) -> tuple[Mapping[CheckpointRef, float], Callable[[Value], bool]]:
    """Parse a text such as 'loss > 4.5'; return the values of its metric, at the checkpoints that have one, and the
    test of a value."""
    found = _EXPRESSION.fullmatch(text)
    try:
        limit = float(found["number"]) if found else math.nan
    except ValueError:
        limit = math.nan
    if found is None or math.isnan(limit):
        raise SetupError(
            f"bisect: {text!r} is not understood: METRIC > NUMBER, as 'loss > 4.5', with <, <=, > or >=, or a function"
        )
    metric = found["metric"]
    sql = "SELECT run, step, name, value FROM metrics WHERE list_contains($runs, run)"
    rows = history.query(sql, {"runs": sorted({ref.run for ref in path})}).to_pylist()
    values = {CheckpointRef(row["run"], row["step"]): row["value"] for row in rows if row["name"] == metric}
    if not values:
        names = {row["name"] for row in rows}
        raise NotFoundError(f"bisect: no metric {metric!r} was recorded; {nearest(metric, names)}")
    sign = _SIGNS[found["sign"]]

    def holds(value: Value) -> bool:
        if math.isnan(value):
            raise SetupError(
                f"bisect: a value of {metric} is NaN, for which {text!r} is neither true nor false; give a function, "
                f"as lambda c: {metric!r} in c.metrics and not c.metrics[{metric!r}] "
                f"{_OPPOSITES[found['sign']]} {limit:g}"
            )
        return bool(sign(value, limit))

    return values, holds
