"""The result of a replay: a row for each step, beside the run that was replayed, and the verdict."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from capture.replays.change import Change
from catalog.records import CheckpointRef
from dshistory.display.table import Table
from dshistory.replays.followed import Followed, losses_of
from dshistory.replays.parting import Differences, differences
from dshistory.replays.reproducibility import likely_causes
from dshistory.replays.traces import TraceStep, compared_traces

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["ReplayTable", "compared_with", "extent_of"]

_SCHEMA: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("loss", pa.float64()),
        ("loss_before", pa.float64()),
        ("difference", pa.float64()),
        ("tensors", pa.int64()),
        ("differing", pa.int64()),
        ("compared_by", pa.string()),
    ]
)


class ReplayTable(Table):
    """A row for each step of a replay: its loss, that of the run that was replayed (`loss_before`), and how many of its
    tensors differ: in any bit where both have a checkpoint (`compared_by` is "bits"), else in what their fingerprints
    cover, where both have some ("fingerprints")."""

    run: str
    """The run of the replay: a child of the run that it replays."""
    of: CheckpointRef
    """The checkpoint at which it began."""
    identical_until: int
    """The last step up to which nothing that was compared differs."""
    parted: Differences | None
    """The differences at the first checkpoint that differs; None when all are equal, bit for bit."""
    parted_at: int | None
    """The step of that checkpoint."""
    causes: Sequence[str]
    """The causes on record that may be why it parts, in words; none where nothing differs or something was changed."""
    other_batch_at: int | None
    """The first step that was given another batch than before, as far as digests of both are kept; None where all are
    the same."""
    traces: Mapping[int, TraceStep]
    """The comparison of the fingerprints of each step, also of those with a checkpoint."""

    @property
    def first_difference(self) -> int | None:
        """The first step at which a checkpoint or a fingerprint differs; None where nothing does."""
        steps = [step for step, trace in self.traces.items() if trace.differing]
        return min([*steps, *(() if self.parted_at is None else (self.parted_at,))], default=None)

    def plot(self) -> "go.Figure":
        """Draw the loss of both runs. Needs the [notebook] extra."""
        from dshistory.display import plot

        columns = {f"{self.of.run}, replayed": "loss_before", f"{self.run}, the replay": "loss"}
        steps = self["step"].to_pylist()
        lines = {name: (steps, self[column].to_pylist()) for name, column in columns.items()}
        return plot.runs_by_step(lines, value="loss")


def compared_with(followed: Followed, run: str, *, change: Change) -> ReplayTable:
    """Compare the run of a replay with the training that it followed, step by step."""
    history, ref = followed.history, followed.ref
    losses, losses_before = losses_of(history, run), followed.losses()
    captured = {step: CheckpointRef(run, step) for step in history.steps(run) if step > ref.step}
    steps = sorted({step for step in losses if step > ref.step} | set(captured))
    found: dict[int, Differences] = {}
    parted_at: int | None = None
    for step in (step for step in captured if step in followed.checkpoints):
        found[step] = differences(history, followed.checkpoints[step], captured[step], locate=parted_at is None)
        if parted_at is None and found[step]:
            parted_at = step
    traces = compared_traces(history.paths, followed.stretches(), run)
    rows = [
        _row(step, losses.get(step), losses_before.get(step), found.get(step), traces.get(step))
        for step in sorted({*steps, *traces})
    ]
    table = ReplayTable(pa.Table.from_pylist(rows, schema=_SCHEMA))
    table.run, table.of, table.parted_at = run, ref, parted_at
    table.parted = None if parted_at is None else found[parted_at]
    table.traces = traces
    apart = table.first_difference
    table.identical_until = max(
        (step for step in (ref.step, *found, *traces) if apart is None or step < apart), default=ref.step
    )
    last = max((row["step"] for row in rows), default=None)
    table.other_batch_at = followed.first_other_batch(run)
    loss_apart = _first_apart(rows)
    table.causes = _likely_causes(followed, table, loss_apart) if change.changes_nothing else []
    table.note = _verdict(table, found, change=change, loss_apart=loss_apart, last=last)
    return table


def _likely_causes(followed: Followed, table: ReplayTable, loss_apart: int | None) -> list[str]:
    """Return in words what may be why a replay without a change parts from its training; [] where it does not."""
    apart = min((step for step in (table.first_difference, loss_apart) if step is not None), default=None)
    if apart is None:
        return []
    causes = likely_causes(followed.history, table.of, table.run)
    rate = followed.first_other_rate(table.run)
    if rate is not None and rate[0] <= apart:
        causes.insert(0, f"step {rate[0]} was made with the learning rate {rate[1]!r}, before with {rate[2]!r}")
    if table.other_batch_at is not None and table.other_batch_at <= apart:
        causes.insert(0, f"step {table.other_batch_at} was given another batch than before")
    return causes


def _row(
    step: int, loss: float | None, before: float | None, found: Differences | None, trace: TraceStep | None
) -> dict[str, Any]:
    if found is not None:
        compared: tuple[int | None, int | None, str | None] = found.compared, len(found.tensors), "bits"
    elif trace is not None:
        compared = trace.compared, trace.differing, "fingerprints"
    else:
        compared = None, None, None
    return {
        "step": step,
        "loss": loss,
        "loss_before": before,
        "difference": None if loss is None or before is None else loss - before,
        **dict(zip(("tensors", "differing", "compared_by"), compared, strict=True)),
    }


def _first_apart(rows: list[dict[str, Any]]) -> int | None:
    return next((row["step"] for row in rows if row["difference"]), None)


def _verdict(
    table: ReplayTable,
    found: Mapping[int, Differences],
    *,
    change: Change,
    loss_apart: int | None,
    last: int | None,
) -> str:
    said = [f"replay of {table.of} as run {table.run}"]
    if not change.changes_nothing:
        said.append(f"changed: {change}")
        said += [
            f"loss at step {row['step']}: {row['loss']:.4g} instead of {row['loss_before']:.4g}"
            for row in list(table)[-1:]
            if row["difference"] is not None
        ]
    if last is None:
        return "; ".join([*said, "no step was made"])
    if table.first_difference is None and loss_apart is None:
        said += _what_agrees(table, found)
        return "; ".join(said)
    if loss_apart is not None:
        said.append(f"the loss differs first at step {loss_apart}")
    if table.first_difference is not None:
        said += _what_differs(table, found)
    if change.changes_nothing:
        said.append(
            f"likely cause: {'; '.join(table.causes)}"
            if table.causes
            else "no cause is on record: replay once more; two replays that differ mean kernels that are not "
            "deterministic or faulty hardware, two that agree that the script draws on something that is not captured"
        )
    return "; ".join(said)


def _what_agrees(table: ReplayTable, found: Mapping[int, Differences]) -> list[str]:
    said = []
    if found:
        tensors = max(one.compared for one in found.values())
        said.append(f"bit-identical up to step {max(found)}: {len(found)} checkpoints of {tensors} tensors")
    if table.traces:
        most = max(table.traces.values(), key=lambda trace: trace.compared)
        said.append(f"the fingerprints of {len(table.traces)} steps up to {max(table.traces)} agree: {extent_of(most)}")
    if not said:
        said.append(
            f"nothing was captured after {table.of} in both runs, so only losses could be compared, and they agree"
        )
    return said


def extent_of(trace: TraceStep) -> str:
    """Return how much was compared, in words."""
    if not trace.sampled:
        return f"all bytes of {trace.compared} tensors"
    return f"a sample of {trace.sampled} tensors, all bytes of {trace.compared - trace.sampled}"


def _what_differs(table: ReplayTable, found: Mapping[int, Differences]) -> list[str]:
    said = []
    bits = max((step for step in found if table.parted_at is None or step < table.parted_at), default=table.of.step)
    differing = {step: trace for step, trace in table.traces.items() if trace.differing}
    if differing:
        first = min(differing)
        agreeing = [step for step in table.traces if step < first]
        until = f"agree up to step {max(agreeing)} and " if agreeing else ""
        said.append(f"the fingerprints {until}differ first at step {first}: {differing[first]}")
    if table.parted is not None and table.parted_at is not None:
        said.append(_what_parted(table.parted, table.parted_at, identical_until=bits))
    elif found:
        said.append(f"bit-identical at {len(found)} checkpoints up to step {bits}")
    return said


def _what_parted(parted: Differences, step: int, *, identical_until: int) -> str:
    same = f"bit-identical up to step {identical_until}, "
    if not parted.tensors:
        return f"{same}and at step {step} only {', '.join(parted.objects)} differ"
    place = f": {parted.first}" if parted.first is not None else f": {'/'.join(parted.tensors[0])}"
    more = f", and {len(parted.tensors) - 1} more tensors" if len(parted.tensors) > 1 else ""
    return f"{same}parts at step {step}{place}{more}"
