"""What is out of line in a run: each kind of trouble with the step and tensor where it is first seen.

All from the statistics and sketches that the catalog has; nothing is read. "Out of line" is against the tensor's own past: five
times more than in any of the eight analyzed checkpoints before, of which there must be three at least; after a longer gap than
any between them, as many times more again as the gap is longer.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from catalog.history import History
from catalog.records import CheckpointRef
from catalog.references import committed_lineage
from dshistory.comparison.sketch_estimates import estimated
from dshistory.display.formats import counted
from dshistory.display.table import Table
from dshistory.metrics import Floats
from dshistory.trends.statistics_cache import Figures, figures
from dshistory.trends.statistics_matrix import Key

__all__ = ["anomalies"]

_SCHEMA: Final = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int64()),
        ("anomaly", pa.string()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("value", pa.float64()),
        ("usual", pa.float64()),
    ]
)
_PARTS: Final = ("squares", "nonfinite", "zeros_share", "relative_update", "largest")
_MOMENTS: Final = ("exp_avg_sq",)
_LEAST_PAST: Final = 3

Mask = npt.NDArray[np.bool_]
Parts = Mapping[str, npt.NDArray[Any]]
"""(tensors, analyzed checkpoints) of each part; `past`: how many of the eight checkpoints before the tensor was in; `longer`: see
`_longer`."""

Finding = tuple[Mask, Floats, Floats]
"""Where it is seen, how large it is there, and how large it was before."""


def anomalies(history: History, *, run: str | None) -> Table:
    """See `Explorer.anomalies`."""
    refs = committed_lineage(history.paths, run)
    known = figures(history, refs, lambda keys: _PARTS if any(kind in _MOMENTS for kind, _ in keys) else _PARTS[:-1])
    rows = _found(known.refs, known.keys, _all_of(history, known)) if known.refs else []
    return Table(pa.Table.from_pylist(rows, schema=_SCHEMA), note=_note(len(rows), len(known.refs), len(refs)))


def _all_of(history: History, known: Figures) -> Mapping[str, npt.NDArray[Any]]:
    """The parts, with what is worked out of them; see `Parts`."""
    longer = np.broadcast_to(_longer([ref.step for ref in known.refs]), known.known.shape)
    ratios = _with_forks(history, known)
    return {**known.parts, "relative_update": ratios, "past": _counts_before(known.known), "longer": longer}


def _note(found: int, analyzed: int, checkpoints: int) -> str:
    """What was looked at, since no row does not mean that nothing is wrong where nothing was looked at."""
    anomalies = f"{found} anomal{'y' if found == 1 else 'ies'}"
    if analyzed == 0:
        return f"unknown: {_of(analyzed, checkpoints)} has statistics, `analyze` computes them"
    few = "" if analyzed > _LEAST_PAST else f"; too few for jumps, which need {_LEAST_PAST} before them"
    if analyzed == checkpoints:
        return f"{anomalies} in {counted(checkpoints, 'checkpoint')}{few}"
    return f"{anomalies} in the {_of(analyzed, checkpoints)} that have statistics, `analyze` computes the others{few}"


def _of(analyzed: int, checkpoints: int) -> str:
    return f"{analyzed or 'none'} of {counted(checkpoints, 'checkpoint')}"


def _found(refs: Sequence[CheckpointRef], keys: Sequence[Key], parts: Parts) -> list[Mapping[str, Any]]:
    """A row for each kind of trouble and tensor, where it is seen first."""
    found = []
    for anomaly, (kinds, look) in _LOOKS.items():
        which = [tensor for tensor, (kind, _) in enumerate(keys) if kinds is None or kind in kinds]
        if not which:
            continue
        chosen = parts if len(which) == len(keys) else {name: part[which] for name, part in parts.items()}
        with np.errstate(all="ignore"):
            seen, value, usual = look(chosen)
        for row in np.flatnonzero(seen.any(axis=1)).tolist():
            place = int(seen[row].argmax())
            found.append((place, anomaly, keys[which[row]], float(value[row, place]), float(usual[row, place])))
    found.sort(key=lambda each: (each[0], each[1] != "not finite", each[1], -each[3], each[2]))
    return [
        {
            "run": refs[place].run,
            "step": refs[place].step,
            "anomaly": anomaly,
            "kind": kind,
            "name": name,
            "value": value,
            "usual": usual,
        }
        for place, anomaly, (kind, name), value, usual in found
    ]


def _not_finite(parts: Parts) -> Finding:
    odd = parts["nonfinite"]
    return (odd > 0) & ~(_before(odd) > 0), odd, np.zeros_like(odd)


def _norm_jumps(parts: Parts) -> Finding:
    usable = (parts["squares"] > 0) & (parts["nonfinite"] == 0)
    logarithms = np.where(usable, np.log(parts["squares"]) / 2, np.nan)
    jump = np.abs(logarithms - _before(logarithms))
    usual = _most_before(jump)
    return (
        (jump > 0.01) & (jump > 5 * usual * parts["longer"]) & (parts["past"] >= _LEAST_PAST),
        np.exp(jump),
        np.exp(usual),
    )


def _large_update(parts: Parts) -> Finding:
    ratio = np.where(np.isinf(parts["relative_update"]), np.nan, parts["relative_update"])
    usual = _most_before(ratio)
    return (ratio > 5 * usual * parts["longer"]) & (parts["past"] >= _LEAST_PAST), ratio, usual


def _second_moment_explodes(parts: Parts) -> Finding:
    largest = parts["largest"]
    usual = _most_before(largest)
    return (largest > 100 * usual * parts["longer"]) & (usual > 0) & (parts["past"] >= _LEAST_PAST), largest, usual


def _goes_to_zero(parts: Parts) -> Finding:
    share = parts["zeros_share"]
    before = _before(share)
    return (share >= 0.5) & (before < 0.5), share, before


_LOOKS: Final[Mapping[str, tuple[Collection[str] | None, Callable[[Parts], Finding]]]] = {
    "not finite": (None, _not_finite),
    "norm jumps": (("model", "master", "buffer"), _norm_jumps),
    "large update": (("model", "master"), _large_update),
    "second moment explodes": (_MOMENTS, _second_moment_explodes),
    "goes to zero": (("model", "master"), _goes_to_zero),
}
"""Each kind of trouble: in which kinds of tensors (None: all) it is looked for, and how."""


def _before(values: Floats, by: int = 1) -> Floats:
    """The same, of so many checkpoints before; NaN where there is none."""
    shifted = np.full_like(values, np.nan)
    shifted[:, by:] = values[:, :-by]
    return shifted


def _most_before(values: Floats) -> Floats:
    """The largest of the eight before that are known."""
    most = _before(values)
    for by in (1, 2, 4):
        most = np.fmax(most, _before(most, by))
    return most


def _counts_before(known: Mask) -> npt.NDArray[np.int8]:
    """In how many of the eight before it is known."""
    counts = np.zeros(known.shape, np.int8, order="F")
    for by in range(1, 9):
        counts[:, by:] += known[:, :-by]
    return counts


def _longer(steps: Sequence[int]) -> Floats:
    """How many times longer the way from the checkpoint before is than any of the eight before that; 1 where it is not."""
    gaps = np.diff(np.array(steps, np.float64), prepend=np.nan)[np.newaxis]
    return np.fmax(1.0, gaps / _most_before(gaps))


def _with_forks(history: History, known: Figures) -> Floats:
    """Relative updates; the catalog counts moves within a run: of the first checkpoint after a fork, from the sketches of both sides."""
    ratios, refs = known.parts["relative_update"], known.refs
    forks = [place for place in range(1, len(refs)) if refs[place].run != refs[place - 1].run]
    if forks:
        ratios = ratios.copy(order="K")
    for place in forks:
        found = estimated(history, refs[place - 1], refs[place])
        for tensor, key in enumerate(known.keys):
            if key in found:
                ratios[tensor, place] = found[key]["relative_update"]
    return ratios
