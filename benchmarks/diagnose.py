"""Trainings with one planted cause, and trainings without any: how often `diagnose` names the cause first, with its
step and a tensor that was hit, and how often it is silent where there is nothing.

Half of the numbers that trainings are drawn from were looked at while `diagnose` was written; the table is of the other
half. *Loud* and *faint* are sizes of the cause. A step between two checkpoints counts as named where the diagnosis
gives the two.
"""

import random
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dshistory
from benchmarks.measure import Rows, Series
from benchmarks.planted import CAUSES, OPTIMIZERS, Case, Truth, train

COLUMNS = {
    "all": "%",
    **dict.fromkeys(OPTIMIZERS, "%"),
    **{f"every {far}": "%" for far in (1, 5, 10)},
    "loud": "%",
    "faint": "%",
    "trainings": "x",
}
FIRST_HELD_BACK = 5000
"""Smaller numbers were looked at."""
_WORKERS = 2
_SILENT = 3
"""So many trainings without a cause for each one with a certain cause."""


def run(
    scratch: Path,
    *,
    every: Sequence[int],
    causes: Sequence[str] = tuple(CAUSES),
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    trainings: int | None = None,
) -> tuple[Rows, dict[str, object]]:
    """Return the share of trainings that were diagnosed rightly, by cause; `trainings`: only the first of an order that
    mixes them."""
    wanted = cases(every, causes, optimizers)
    random.Random(0).shuffle(wanted)
    wanted = wanted[:trainings]
    with ProcessPoolExecutor(_WORKERS) as pool:
        rights = list(pool.map(partial(_is_diagnosed, scratch), wanted))
    used = {"every": list(every), "first number": FIRST_HELD_BACK, "trainings": len(wanted)}
    return shares(list(zip(wanted, rights, strict=True))), used


def _is_diagnosed(scratch: Path, case: Case) -> bool:
    torch.set_num_threads(1)
    folder = scratch / f"{case.optimizer}-{case.seed}"
    truth = train(folder, case)
    explorer = dshistory.open(folder)
    explorer.analyze(quiet=True)
    right = is_right(case, truth, list(explorer.diagnose(quiet=True)))
    shutil.rmtree(folder)
    return right


def shares(results: Sequence[tuple[Case, bool]]) -> Rows:
    """Return the share of right diagnoses, by cause and by size and distance of checkpoints, and the two totals."""
    found: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for case, right in results:
        total = "all without a cause: silent" if case.cause == "nothing" else "all causes: right first"
        for row in (total, *([] if case.cause == "nothing" else [case.cause])):
            for column in ("all", case.optimizer, f"every {case.every}", "loud" if case.loud else "faint"):
                found[row][column].append(right)
    return {
        row: {
            **{column: Series([sum(rights) / len(rights)]) for column, rights in columns.items()},
            "trainings": Series([float(len(columns["all"]))]),
        }
        for row, columns in found.items()
    }


def cases(
    every: Sequence[int], causes: Sequence[str], optimizers: Sequence[str], *, first: int = FIRST_HELD_BACK
) -> list[Case]:
    """Return a loud and a faint case of each cause, and several of none, for each optimizer and distance of
    checkpoints."""
    wanted = [
        (optimizer, far, loud, cause)
        for optimizer in optimizers
        for far in every
        for loud in (True, False)
        for cause in causes
    ]
    return [
        Case(cause, loud, far, first + 10 * number + again, optimizer)
        for number, (optimizer, far, loud, cause) in enumerate(wanted)
        for again in range(_SILENT if cause == "nothing" else 1)
    ]


def is_right(case: Case, truth: Truth, found: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the first row names the cause, an interval with its step, and first a tensor that it hit."""
    if truth.step is None or not found:
        return truth.step is None and not found
    first = found[0]
    if first["cause"] != case.cause:
        return False
    if first["since"] >= truth.step + truth.gradual + 1 or first["step"] < truth.step:
        return False
    if first["step"] > truth.step + truth.gradual + case.every - 1:
        return False
    # Between two checkpoints what is not finite spreads over everything.
    if not truth.tensors or (case.cause == "not finite" and case.every > 1):
        return True
    return bool(first["tensors"]) and first["tensors"][0] in truth.tensors
