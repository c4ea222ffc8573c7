"""The result of a replay: a row for each step, beside the run that was replayed, and the verdict."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from capture.replays.change import Change
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.display.table import Table
from dshistory.replays.followed import Followed, losses_of
from dshistory.replays.parting import Differences, differences
from dshistory.replays.reproducibility import likely_causes

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["ReplayTable", "compared_with"]

_SCHEMA: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("loss", pa.float64()),
        ("loss_before", pa.float64()),
        ("difference", pa.float64()),
        ("tensors", pa.int64()),
        ("differing", pa.int64()),
    ]
)


class ReplayTable(Table):
    """A row for each step of a replay: its loss, that of the run that was replayed (`loss_before`), and, where both
    have a checkpoint, how many of its tensors differ in any bit."""

    run: str
    """The run of the replay: a child of the run that it replays."""
    of: CheckpointRef
    """The checkpoint at which it began."""
    identical_until: int
    """The last step up to which nothing that was compared differs."""
    parted: Differences | None
    """What differs at the first checkpoint that differs; None when all are equal, bit for bit."""
    parted_at: int | None
    """The step of that checkpoint."""

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
    rows = [_row(step, losses.get(step), losses_before.get(step), found.get(step)) for step in steps]
    table = ReplayTable(pa.Table.from_pylist(rows, schema=_SCHEMA))
    table.run, table.of, table.parted_at = run, ref, parted_at
    table.parted = None if parted_at is None else found[parted_at]
    table.identical_until = max(
        (step for step in (ref.step, *found) if parted_at is None or step < parted_at), default=ref.step
    )
    last = max(steps, default=None)
    table.note = _verdict(history, table, found, change=change, loss_apart=_first_apart(rows), last=last)
    return table


def _row(step: int, loss: float | None, before: float | None, found: Differences | None) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "loss_before": before,
        "difference": None if loss is None or before is None else loss - before,
        "tensors": None if found is None else found.compared,
        "differing": None if found is None else len(found.tensors),
    }


def _first_apart(rows: list[dict[str, Any]]) -> int | None:
    return next((row["step"] for row in rows if row["difference"]), None)


def _verdict(
    history: History,
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
    if table.parted is None and loss_apart is None:
        said.append(
            f"bit-identical up to step {table.identical_until}: {len(found)} checkpoints of "
            f"{max((one.compared for one in found.values()), default=0)} tensors"
            if found
            else f"nothing was captured after {table.of} in both runs, so only losses could be compared, and they agree"
        )
        return "; ".join(said)
    if loss_apart is not None:
        said.append(f"the loss differs first at step {loss_apart}")
    if table.parted is not None and table.parted_at is not None:
        said.append(_what_parted(table.parted, table.parted_at, identical_until=table.identical_until))
    if change.changes_nothing:
        causes = likely_causes(history, table.of, table.run)
        said.append(
            f"likely cause: {'; '.join(causes)}"
            if causes
            else "no cause is on record: replay once more; two replays that differ mean kernels that are not "
            "deterministic or faulty hardware, two that agree that the script draws on something that is not captured"
        )
    return "; ".join(said)


def _what_parted(parted: Differences, step: int, *, identical_until: int) -> str:
    same = f"bit-identical up to step {identical_until}, "
    if not parted.tensors:
        return f"{same}and at step {step} only {', '.join(parted.objects)} differ"
    place = f": {parted.first}" if parted.first is not None else f": {'/'.join(parted.tensors[0])}"
    more = f", and {len(parted.tensors) - 1} more tensors" if len(parted.tensors) > 1 else ""
    return f"{same}parts at step {step}{place}{more}"
