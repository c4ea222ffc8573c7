"""The spectra of weight matrices: their largest singular values, and how many directions they really use.

The squares of the singular values of A are the eigenvalues of the smaller one of A^T A and A A^T, which is added up in
float64 from blocks of A: so one matrix in its own dtype and k^2 float64 values are in memory, where k is its smaller
side. Values below 1e-7 of the largest are lost in the squares. Where k exceeds _MOST_SIDE, the largest values come from
a random projection with power iterations in float32 instead (Halko, Martinsson and Tropp, arXiv:0909.4061), and the
effective rank, which needs all of them, is unknown.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import torch

from catalog.errors import SetupError
from catalog.history import History
from catalog.read.fragments import StoredTensor
from catalog.records import CheckpointRef
from dshistory.display.formats import counted
from dshistory.display.progress import ByteProgress
from dshistory.display.table import Table
from dshistory.display.text import Layout
from dshistory.patterns import Patterns, matching
from dshistory.tensors.checkpoint_tensors import CheckpointTensors

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["SpectraTable", "singular_values", "spectra"]

_SCHEMA: Final = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int64()),
        ("name", pa.string()),
        ("kind", pa.string()),
        ("rows", pa.int64()),
        ("columns", pa.int64()),
        ("largest", pa.float64()),
        ("stable_rank", pa.float64()),
        ("effective_rank", pa.float64()),
        ("singular_values", pa.list_(pa.float64())),
    ]
)
_LAYOUT: Final = Layout(in_title=("run",), gives_way=("run", "singular_values", "kind"))
_PLOTTED: Final = ("stable_rank", "effective_rank", "largest")
_MOST_SIDE: Final = 4096
_BLOCK_NUMEL: Final = 1 << 22
_MORE_DIRECTIONS: Final = 16
_POWER_ITERATIONS: Final = 4


class SpectraTable(Table):
    """A row for each matrix and checkpoint; see `Explorer.spectra`."""

    def plot(self, figure: str = "stable_rank") -> "go.Figure":
        """Draw `stable_rank`, `effective_rank` or `largest` over the steps, a line for each matrix. Needs the
        [notebook] extra. SetupError for another figure."""
        from dshistory.display import plot

        if figure not in _PLOTTED:
            raise SetupError(f"plot: figure={figure!r}: give one of {', '.join(_PLOTTED)}")
        rows = self.to_arrow()
        lines = pa.table({"run": rows["run"], "step": rows["step"], "name": rows["name"], "value": rows[figure]})
        return plot.curves(Table(lines), x="step", empty="no matrix was found")


def spectra(
    history: History, refs: Sequence[CheckpointRef], *, names: Patterns, kind: str, top: int, quiet: bool
) -> SpectraTable:
    """See `Explorer.spectra`."""
    if top < 1:
        raise SetupError(f"spectra: top={top}: give the number of singular values to keep, at least 1")
    chosen = {ref: _matrices(history, ref, names, kind) for ref in refs}
    total = sum(tensor.nbytes for found in chosen.values() for tensor in found.values())
    rows = []
    with ByteProgress(total, description=f"spectra of {counted(len(refs), 'checkpoint')}", quiet=quiet) as bar:
        for ref, found in chosen.items():
            checkpoint = CheckpointTensors(history, ref, advance=bar.advance)
            rows += [
                _row(checkpoint.whole(tensor), top=top) | {"run": ref.run, "step": ref.step, "name": name, "kind": kind}
                for name, tensor in found.items()
            ]
    matrices = len({row["name"] for row in rows})
    note = f"{counted(matrices, 'tensor')} of two or more dimensions in {counted(len(refs), 'checkpoint')}"
    return SpectraTable(pa.Table.from_pylist(rows, schema=_SCHEMA), note=note, layout=_LAYOUT)


def _matrices(history: History, ref: CheckpointRef, names: Patterns, kind: str) -> dict[str, StoredTensor]:
    """Return the chosen tensors of a checkpoint that are matrices, by name."""
    found = CheckpointTensors(history, ref, advance=lambda nbytes: None).of_kind(kind)
    wanted = matching(set(found), names, what="tensor", where=f"the kind {kind!r} of {ref}")
    return {name: found[name] for name in found if name in wanted and min(_sides(found[name].shape)) > 1}


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns: the first dimension, and all others as one, as in a convolution."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)


def _row(tensor: torch.Tensor, *, top: int) -> dict[str, Any]:
    matrix = tensor.reshape(_sides(tensor.shape))
    row: dict[str, Any] = {"rows": matrix.shape[0], "columns": matrix.shape[1]}
    if not matrix.dtype.is_floating_point or not bool(torch.isfinite(matrix).all()):
        return row
    values, squares = singular_values(matrix, top=top)
    largest = float(values[0])
    row |= {"largest": largest, "singular_values": values[:top].tolist()}
    if largest > 0:
        row["stable_rank"] = squares / largest**2
        if len(values) == min(matrix.shape):
            shares = values[values > 0] / values.sum()
            row["effective_rank"] = math.exp(-float((shares * shares.log()).sum()))
    return row


def singular_values(matrix: torch.Tensor, *, top: int) -> tuple[torch.Tensor, float]:
    """Return the singular values of a finite matrix, descending, in float64, and the sum of all their squares: all of
    them, or where its smaller side exceeds _MOST_SIDE `top` or a few more."""
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    side = tall.shape[1]
    if side > _MOST_SIDE:
        directions = min(side, top + _MORE_DIRECTIONS)
        # Its own generator, so that a look changes nothing and is the same every time.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _, values, _ = torch.svd_lowrank(tall.float(), q=directions, niter=_POWER_ITERATIONS)
        squares = sum(float(block.double().square().sum()) for block in _blocks(tall))
        return values[:top].double(), squares
    gram = torch.zeros(side, side, dtype=torch.float64)
    for block in _blocks(tall):
        exact = block.double()
        gram.addmm_(exact.T, exact)
    eigenvalues = torch.linalg.eigvalsh(gram).flip(0).clamp_(min=0)
    return eigenvalues.sqrt(), float(gram.diagonal().sum())


def _blocks(tall: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the matrix in blocks of rows, each small enough for a copy in float64."""
    height = max(1, _BLOCK_NUMEL // tall.shape[1])
    return [tall[begin : begin + height] for begin in range(0, tall.shape[0], height)]
