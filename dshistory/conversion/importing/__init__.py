"""Imports checkpoints of other programs into a history: one reader for each format, chosen by the names in a folder."""

import datetime
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from catalog.errors import FormatError, SetupError
from dshistory.registry import verb

if TYPE_CHECKING:
    from dshistory.conversion.importing.discover import Candidate
    from dshistory.conversion.importing.foreign_checkpoint import ForeignCheckpoint, Reader
    from dshistory.display.table import Table

__all__ = ["READERS", "import_checkpoint"]

READERS: Final = ("trainer", "deepspeed", "dcp", "safetensors", "torch")
"""The formats, in the order in which their readers are asked whether they recognise a folder."""

_MODULES: Final = {"torch": "torchfile"}


@verb(
    "import outputs/ --history my-history",
    "import model.safetensors --step 1200",
    name="import",
    needs_history=False,
)
def import_checkpoint(
    path: Path | str,
    *,
    history: Path | str | None = None,
    step: int | None = None,
    format: str | None = None,
    quiet: bool = False,
) -> "Table":
    """Import checkpoints that other programs wrote as a new run of a history: a row for each, with its step.

    No code in them is executed: pickles are read by `torch.load(weights_only=True)`, with the few known classes of
    their format as data, and a file with any other class is refused by name. Files that `capture.checkpoint_engine`
    saved are verified first. The column `left_out` names what is not imported. Of a Trainer's folder, optimizer,
    scheduler, random numbers and log are imported too. Raises NotFoundError when there is no checkpoint, SetupError
    when a step is unknown or occurs twice, FormatError and UnsupportedError for a checkpoint that cannot be read; the
    checkpoints before it are imported by then.

    Args:
        path: a checkpoint, or a folder whose folders or files are checkpoints
        history: the history, created when it does not exist; default: $DSHISTORY, else ./history
        step: the step of a single checkpoint; default: the one in its name, else in its content
        format: trainer, deepspeed, dcp, safetensors or torch; default: recognised by the names of files
        quiet: no progress bar
    """
    from capture.defaults import history_path
    from dshistory.conversion.importing.discover import discover

    readers = {
        name: cast("Reader", import_module(f"dshistory.conversion.importing.{_MODULES.get(name, name)}"))
        for name in READERS
    }
    source = Path(path).expanduser().absolute()
    candidates = discover(source, readers, format=format)
    found = [(candidate, readers[candidate.format].read(candidate.path)) for candidate in candidates]
    steps = _steps(found, step)
    for candidate, content in found:
        _check(candidate, content)
    return _write(
        history_path(history), source, sorted(zip(steps, found, strict=True), key=lambda one: one[0]), quiet=quiet
    )


def _steps(found: Sequence[tuple["Candidate", "ForeignCheckpoint"]], given: int | None) -> list[int]:
    if given is not None and len(found) > 1:
        names = ", ".join(candidate.path.name for candidate, _ in found[:3])
        raise SetupError(
            f"step={given} is for one checkpoint, but there are {len(found)}: {names}; import one of them, or omit step"
        )
    steps = []
    for candidate, content in found:
        step = next((one for one in (given, candidate.step, content.step) if one is not None), None)
        if step is None or step < 0:
            raise SetupError(
                f"the step of {candidate.path} is not known: pass step=, or name it like global_step100 or "
                "checkpoint-100"
            )
        steps.append(step)
    for step, count in Counter(steps).items():
        if count > 1:
            twice = [str(candidate.path) for (candidate, _), one in zip(found, steps, strict=True) if one == step]
            raise SetupError(f"{' and '.join(twice[:3])} are all of step {step}: import one of them")
    return steps


def _check(candidate: "Candidate", content: "ForeignCheckpoint") -> None:
    """Raise FormatError for a name that occurs twice or that a history reserves for itself."""
    from catalog.format.manifest import NOT_STATE

    if not content.tensors:
        raise FormatError(f"{candidate.path} ({candidate.format}) has no tensors")
    keys = Counter(f"{tensor.kind}/{tensor.name}" for tensor in content.tensors)
    wrong = [key for key, count in keys.items() if count > 1 or key.partition("/")[0] in NOT_STATE]
    if wrong:
        raise FormatError(
            f"{candidate.path} ({candidate.format}): the tensor {wrong[0]!r} occurs twice, or has a reserved name"
        )


def _write(
    root: Path, source: Path, found: list[tuple[int, tuple["Candidate", "ForeignCheckpoint"]]], *, quiet: bool
) -> "Table":
    import pyarrow as pa

    from catalog.index import index
    from catalog.records import RunFacts
    from catalog.run_writer import RunWriter, create_history, create_run, new_run_id
    from dshistory.conversion.importing.writer import StoredBefore, write_checkpoint
    from dshistory.display.progress import ByteProgress
    from dshistory.display.table import Table

    create_history(root)
    run = new_run_id()
    formats = sorted({candidate.format for _, (candidate, _) in found})
    facts = {**found[0][1][1].facts, "imported": {"from": str(source), "formats": formats}}
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    create_run(root, RunFacts(run, created, 1, None, None, "imported", facts))
    rows: list[dict[str, Any]] = []
    total = sum(tensor.nbytes for _, (_, content) in found for tensor in content.tensors)
    with (
        RunWriter(root, run=run, rank=0, world_size=1, layout_hash="imported") as writer,
        ByteProgress(total, description="import", quiet=quiet) as bar,
    ):
        before: StoredBefore = {}
        metrics: dict[tuple[int, str], float] = {}
        for _, (_, content) in found:
            metrics.update(content.metrics)
        for (at, name), value in metrics.items():
            writer.journal.metric(at, name, value)
        for step, (candidate, content) in found:
            before = write_checkpoint(writer, step, content, before=before, advance=bar.advance)
            rows.append(
                {
                    "step": step,
                    "run": run,
                    "format": candidate.format,
                    "tensors": len(content.tensors),
                    "bytes": sum(tensor.nbytes for tensor in content.tensors),
                    "left_out": ", ".join(content.left_out) or None,
                    "from": str(candidate.path),
                }
            )
        index.register(writer.paths)
    schema = pa.schema(
        [
            ("step", pa.int64()),
            ("run", pa.string()),
            ("format", pa.string()),
            ("tensors", pa.int64()),
            ("bytes", pa.int64()),
        ]
        + [("left_out", pa.string()), ("from", pa.string())]
    )
    note = f"{len(rows)} checkpoint{'' if len(rows) == 1 else 's'} imported as run {run} of {root}"
    return Table(pa.Table.from_pylist(rows, schema=schema), formats={"bytes": "bytes"}, note=note)
