"""The package as type checkers see it, generated from the registry of verbs by a test."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import capture as capture
from catalog.errors import HistoryError
from catalog.retention.policy import Keep
from dshistory.causes.audit import AuditTable
from dshistory.causes.audits import AuditsTable
from dshistory.causes.diagnose import DiagnosisTable
from dshistory.comparison.diff import DiffTable
from dshistory.display.report import Report
from dshistory.display.table import Table
from dshistory.explorer import Explorer
from dshistory.hindsight.attribution import AttributionTable
from dshistory.hindsight.computed_state import ComputedState
from dshistory.hindsight.evaluation import EvaluationTable
from dshistory.hindsight.loss_line import LineTable
from dshistory.options import (
    Changes,
    Command,
    ExportFormat,
    Grouping,
    Metric,
    Part,
    Predicate,
    Ref,
    ReplayPredicate,
    SkippedSteps,
    Steps,
    Undo,
    Verified,
)
from dshistory.patterns import Patterns
from dshistory.replays.bisection import ReplayBisection
from dshistory.replays.crossover import CrossoverTable
from dshistory.replays.rebuild import RebuiltTable
from dshistory.replays.result import ReplayTable
from dshistory.replays.runs import RunsTable
from dshistory.replays.side_by_side import ComparedRuns
from dshistory.reports.log import LogTable
from dshistory.retention.removal import RemovalTable
from dshistory.trends.anomalies import AnomalyTable
from dshistory.trends.bisect import Bisection
from dshistory.trends.distances import DistanceTable
from dshistory.trends.histogram import HistogramTable
from dshistory.trends.layers_table import LayersTable
from dshistory.trends.spectra import SpectraTable
from dshistory.trends.trajectory import TrajectoryTable
from dshistory.widgets import Exploration

__all__ = [
    "Explorer",
    "HistoryError",
    "Report",
    "Table",
    "analyze",
    "anomalies",
    "attribute",
    "audit",
    "audit_all",
    "average",
    "bisect",
    "bisect_replay",
    "compact",
    "compare",
    "convert",
    "crossover",
    "delta",
    "diagnose",
    "diff",
    "distances",
    "doctor",
    "evaluate",
    "explore",
    "export",
    "fingerprints",
    "histogram",
    "import_checkpoint",
    "interpolate",
    "layers",
    "log",
    "losses_between",
    "prune",
    "rank_agreement",
    "rebuild",
    "redo_check",
    "reindex",
    "remove",
    "replay",
    "replay_check",
    "reproducibility",
    "restore",
    "resume_folder",
    "runs",
    "show",
    "spectra",
    "sql",
    "tags",
    "tensor",
    "trajectory",
    "usage",
    "verify",
    "watch",
]
__version__: str

def analyze(ref: Ref | None = None, *, quiet: bool = False) -> Table: ...
def anomalies(*, run: str | None = None) -> AnomalyTable: ...
def attribute(
    a: Ref,
    b: Ref,
    loss_fn: Callable[[Any], Any],
    *,
    model: Any,
    by: Part = "layer",
    kinds: Patterns = "model",
    quiet: bool = False,
) -> AttributionTable: ...
def audit(a: Ref | None = None, b: Ref = "latest", *, names: Patterns = "*", quiet: bool = False) -> AuditTable: ...
def audit_all(*, run: str | None = None, redo: bool = False, quiet: bool = False) -> AuditsTable: ...
def average(
    steps: Steps,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    kinds: Patterns = "model",
    names: Patterns = "*",
    run: str | None = None,
    quiet: bool = False,
) -> ComputedState: ...
def bisect(
    predicate: Predicate,
    good: Ref | None = None,
    bad: Ref | None = None,
    *,
    model: Any = None,
    run: str | None = None,
    quiet: bool = False,
) -> Bisection: ...
def bisect_replay(
    good: Ref,
    bad: int,
    *,
    predicate: ReplayPredicate = None,
    undo: Undo = "skip",
    linear: bool = False,
    until: int | None = None,
    command: Command = None,
    train_step: Callable[[Any], Any] | None = None,
    engine: Any = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    dataloader: Any = None,
    providers: Sequence[Any] = (),
    batches_per_step: int = 1,
    quiet: bool = False,
) -> ReplayBisection: ...
def compact(
    steps: Steps | None = None, *, run: str | None = None, key_every: int = 10, newest: int = 1, quiet: bool = False
) -> Table: ...
def compare(
    *runs: str, names: Patterns = "*", kinds: Patterns = "model", exact: bool = False, quiet: bool = False
) -> ComparedRuns: ...
def convert(
    path: Path | str, *, to: Path | str | None = None, overwrite: bool = False, quiet: bool = False
) -> Table: ...
def crossover(
    a: Ref,
    b: Ref,
    *,
    batches: Sequence[int],
    train_step: Callable[[Any], Any],
    dataloader: Callable[[int], Any],
    engine: Any = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    providers: Sequence[Any] = (),
    sets: int = 5,
    probes: int = 8,
    quiet: bool = False,
) -> CrossoverTable: ...
def delta(
    a: Ref, b: Ref = "latest", *, kinds: Patterns = "model", names: Patterns = "*", quiet: bool = False
) -> ComputedState: ...
def diagnose(step: int | None = None, *, run: str | None = None, quiet: bool = False) -> DiagnosisTable: ...
def diff(
    a: Ref,
    b: Ref = "latest",
    *,
    kinds: Patterns = "model",
    names: Patterns = "*",
    by: Grouping = "tensor",
    metrics: Patterns | None = None,
    exact: bool = False,
    tensor: str | None = None,
    axis: int = 0,
    parts: int | None = None,
    quiet: bool = False,
) -> DiffTable: ...
def distances(names: Patterns = "*", *, kinds: Patterns = "model", run: str | None = None) -> DistanceTable: ...
def doctor(folder: str | None = None, *, size_mib: int = 256) -> Report: ...
def evaluate(
    fn: Callable[[Any], Any],
    *,
    model: Any,
    steps: Steps | None = None,
    name: str | None = "val_loss",
    weights: str = "model",
    workers: int = 1,
    again: bool = False,
    run: str | None = None,
    quiet: bool = False,
) -> EvaluationTable: ...
def explore(names: Patterns = "*", *, kinds: Patterns = "model", run: str | None = None) -> Exploration: ...
def export(
    step: Ref,
    path: Path | str,
    *,
    format: ExportFormat = "safetensors",
    weights: str = "model",
    shard_bytes: int | None = None,
    config: Path | str | None = None,
    model: Any = None,
    zero_stage: int | None = None,
    world_size: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Table: ...
def fingerprints(*, run: str | None = None) -> Table: ...
def histogram(
    name: str, *, state: str = "model", run: str | None = None, signs: bool = False, quiet: bool = False
) -> HistogramTable: ...
def import_checkpoint(
    path: Path | str,
    *,
    history: Path | str | None = None,
    step: int | None = None,
    format: str | None = None,
    quiet: bool = False,
) -> Table: ...
def interpolate(
    a: Ref, b: Ref, t: float = 0.5, *, kinds: Patterns = "model", names: Patterns = "*", quiet: bool = False
) -> ComputedState: ...
def layers(
    names: Patterns = "*",
    *,
    metric: str = "relative_update",
    kinds: Patterns = "model",
    run: str | None = None,
    first: int | None = None,
    last: int | None = None,
    quiet: bool = False,
) -> LayersTable: ...
def log(*, run: str | None = None, metrics: Patterns | None = None) -> LogTable: ...
def losses_between(
    a: Ref,
    b: Ref,
    loss_fn: Callable[[Any], Any],
    *,
    model: Any,
    t: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    quiet: bool = False,
) -> LineTable: ...
def open(path: Path | str | None = None) -> Explorer: ...
def prune(keep: Keep, *, run: str | None = None, dry_run: bool = True) -> RemovalTable: ...
def rank_agreement(*, run: str | None = None) -> Table: ...
def rebuild(
    step: int,
    *,
    verify: Verified = "step",
    run: str | None = None,
    command: Command = None,
    train_step: Callable[[Any], Any] | None = None,
    engine: Any = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    dataloader: Any = None,
    providers: Sequence[Any] = (),
    batches_per_step: int = 1,
    quiet: bool = False,
) -> RebuiltTable: ...
def redo_check(*, run: str | None = None) -> Table: ...
def reindex() -> int: ...
def remove(refs: Steps, *, force: bool = False, dry_run: bool = False) -> RemovalTable: ...
def replay(
    step: Ref,
    *,
    until: int | None = None,
    change: Changes = None,
    skip_batches: SkippedSteps = None,
    command: Command = None,
    train_step: Callable[[Any], Any] | None = None,
    engine: Any = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    dataloader: Any = None,
    providers: Sequence[Any] = (),
    batches_per_step: int = 1,
    quiet: bool = False,
) -> ReplayTable: ...
def replay_check(
    count: int = 3,
    *,
    train_step: Callable[[Any], Any],
    engine: Any = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    dataloader: Any = None,
    providers: Sequence[Any] = (),
    batches_per_step: int = 1,
    run: str | None = None,
    seed: int | None = None,
    quiet: bool = False,
) -> Table: ...
def reproducibility(*, run: str | None = None) -> Table: ...
def restore(
    ref: Ref = "latest",
    *,
    engine: Any = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    dataloader: Any = None,
    providers: Sequence[Any] = (),
    names: Patterns | None = None,
    kinds: Patterns | None = None,
    verify: bool = True,
) -> Any: ...
def resume_folder(step: Ref, path: Path | str, *, overwrite: bool = False, quiet: bool = False) -> str: ...
def runs() -> RunsTable: ...
def show(ref: Ref = "latest") -> Report: ...
def spectra(
    *,
    steps: Steps = "latest",
    names: Patterns = "*",
    kind: str = "model",
    top: int = 5,
    run: str | None = None,
    quiet: bool = False,
) -> SpectraTable: ...
def sql(query: str, **params: object) -> Table: ...
def tags() -> Table: ...
def tensor(name: str, step: Ref = "latest", *, state: str = "model") -> torch.Tensor: ...
def trajectory(
    names: Patterns = "*",
    *,
    metric: Metric = "relative_update",
    kinds: Patterns = "model",
    by: str = "tensor",
    run: Patterns | None = None,
    exact: bool = False,
    quiet: bool = False,
) -> TrajectoryTable: ...
def usage(*, run: str | None = None) -> Report: ...
def verify(ref: Ref | None = None, *, quiet: bool = False) -> Table: ...
def watch(
    names: Patterns = "*", *, kinds: Patterns = "model", run: str | None = None, seconds: float = 1.0
) -> Exploration: ...
def load_ipython_extension(ipython: Any) -> None: ...
def unload_ipython_extension(ipython: Any) -> None: ...
