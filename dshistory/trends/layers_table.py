"""The rows of `layers` as a table and as a picture: one line for each layer, one column for each checkpoint."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dshistory.display.formats import text_of
from dshistory.display.scale import Picture, Scale, drawn, drawn_name
from dshistory.display.table import Table
from dshistory.metrics import Floats

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["LayersTable", "Line"]

_PAST: Final = 8
_LEAST_PAST: Final = 3
"""A value is relative to the median of so many values before it at most, and at least."""

Line = tuple[str, str]
"""(kind, layer)"""


class LayersTable(Table):
    """A row for each layer, kind and checkpoint.

    `value` is over so many `tensors`, of which `most` names the one that stands out. `bound` is how far off the value
    may be, relatively, at about 95 %; 0 for an exact one. Null is unknown."""

    metric: str
    since: Mapping[int, int]
    """For a metric about updates: step -> the step of the checkpoint before, from which its values count."""
    relative = False
    """Whether the values are relative to those before; see `against_past`."""

    def grid(self) -> tuple[list[int], list[Line], list[list[float | None]]]:
        """Return the steps, the (kind, layer) of each line, and the values line by line."""
        steps, place = np.unique(self["step"].to_numpy()), self._places()
        line, lines = self._lines()
        values = np.full((len(lines), len(steps)), None, np.object_)
        values[line, place] = self["value"].to_pylist()
        return steps.tolist(), lines, values.tolist()

    def labels(self) -> list[str]:
        """Return the name of each line of the grid: its layer, with the kind where there are several kinds."""
        _, lines = self._lines()
        several = len({kind for kind, _ in lines}) > 1
        return [f"{layer} ({kind})" if several else layer for kind, layer in lines]

    def against_past(self) -> "LayersTable":
        """Return the table with each value divided by the usual one of the same layer: the median of the eight
        checkpoints before in the table, of which three must be known; null where they are not.

        1 is as usual, whatever is usual there, so that a layer that always moves much does not hide one that begins to.
        Signs do not count, and a cosine counts by its distance from 1."""
        steps, lines, values = self.grid()
        numbers = np.array([[np.nan if v is None else abs(drawn(self.metric, v)) for v in line] for line in values])
        line, _ = self._lines()
        ratios = _over_past(numbers.reshape(len(lines), len(steps)))[line, self._places()]
        table = self._with(pa.array(ratios, mask=np.isnan(ratios)))
        table.relative = True
        table.note = f"{self.note}; value is over the median of up to {_PAST} checkpoints before"
        return table

    def picture(self) -> Picture:
        """Return what a figure shows; a cosine as its distance from 1."""
        steps, _, values = self.grid()
        name = f"{drawn_name(self.metric)} over its past" if self.relative else drawn_name(self.metric)
        if not self.relative:
            values = [[None if v is None else drawn(self.metric, v) for v in line] for line in values]
        return Picture(
            steps=steps,
            since=[self.since.get(step) for step in steps],
            lines=self.labels(),
            values=values,
            name=name,
            scale=Scale(values, relative=self.relative),
            relative=self.relative,
        )

    def of(self, name: str) -> "LayersTable":
        """Return the rows of a layer, by its name, the label of its line, or that label as it is shown; none for
        another name."""
        line, lines = self._lines()
        called = [i for i, label in enumerate(self.labels()) if name in (label, text_of(label), lines[i][1])]
        return self._of(self.to_arrow().filter(pa.array(np.isin(line, called))))

    def _places(self) -> npt.NDArray[np.int64]:
        """Return the number of each row's step, from 0."""
        places: npt.NDArray[np.int64] = np.unique(self["step"].to_numpy(), return_inverse=True)[1]
        return places

    def _with(self, values: pa.Array) -> "LayersTable":
        data = self.to_arrow()
        return self._of(data.set_column(data.schema.get_field_index("value"), "value", values))

    def _lines(self) -> tuple[npt.NDArray[np.int64], list[Line]]:
        """Return the number of each row's line, and the lines in the order of their first rows."""
        kinds, layers = self["kind"].unique(), self["layer"].unique()
        of_kind = pc.index_in(self["kind"], value_set=kinds).to_numpy()
        both = of_kind.astype(np.int64) * len(layers) + pc.index_in(self["layer"], value_set=layers).to_numpy()
        found, first, line = np.unique(both, return_index=True, return_inverse=True)
        order = np.argsort(first)
        names = [(kinds[i // len(layers)].as_py(), layers[i % len(layers)].as_py()) for i in found[order].tolist()]
        return np.argsort(order)[line], names

    def plot(self) -> "go.Figure":
        """Draw the values as a heat map, layer by step. Needs the [notebook] extra."""
        from dshistory.display import plot

        return plot.layers_by_step(self.picture())


def _over_past(values: Floats) -> Floats:
    """Divide each value of a line by the median of those before it."""
    before = np.full((_PAST, *values.shape), np.nan)
    for by in range(1, min(_PAST, values.shape[1] - 1) + 1):
        before[by - 1, :, by:] = values[:, :-by]
    before.sort(axis=0)  # NaN comes last
    known = np.isfinite(before).sum(axis=0)
    lower, upper = (
        np.take_along_axis(before, place[np.newaxis], axis=0)[0]
        for place in (np.maximum(known - 1, 0) // 2, np.minimum(known // 2, _PAST - 1))
    )
    usual = np.where(known >= _LEAST_PAST, (lower + upper) / 2, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(usual > 0, values / usual, np.nan)
