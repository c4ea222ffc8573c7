"""Checkpoints of others as a history: one reader for each format, chosen by what a folder holds."""

import datetime
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from catalog.errors import FormatError, SetupError

if TYPE_CHECKING:
    from dshistory.conversion.importing.discover import Place
    from dshistory.conversion.importing.foreign_checkpoint import Found, Reader
    from dshistory.display.table import Table

__all__ = ["READERS", "import_checkpoint"]

READERS: Final = ("deepspeed", "dcp", "safetensors", "torch")
"""The formats, in the order in which they are asked whether a folder is theirs."""

_MODULES: Final = {"torch": "torchfile"}


def import_checkpoint(
    path: Path | str,
    *,
    history: Path | str | None = None,
    step: int | None = None,
    format: str | None = None,
    quiet: bool = False,
) -> "Table":
    """Turn checkpoints that other programs wrote into a run of a history: a row for each, with its step.

    Nothing in them is executed: files of pickles are read by `torch.load(weights_only=True)` with the few known classes of
    their format as data, and refused by name for anything else. What a checkpoint has that is neither weights nor optimizer
    state is named in `left_out`. Raises NotFoundError when there is no checkpoint, SetupError when steps are not known or
    stand twice, FormatError and UnsupportedError for what can't be read; checkpoints before it are imported by then.

    Args:
        path: a checkpoint, or a folder with a checkpoint in each of its folders or files
        history: the history, made when it does not exist; default: $DSHISTORY, else ./history
        step: the step of a single checkpoint; default: as its name says, or its content
        format: deepspeed, dcp, safetensors or torch; default: what it looks like
        quiet: no progress bar
    """
    from capture.defaults import history_path
    from dshistory.conversion.importing.discover import places_of

    readers = {
        name: cast("Reader", import_module(f"dshistory.conversion.importing.{_MODULES.get(name, name)}"))
        for name in READERS
    }
    source = Path(path).expanduser().absolute()
    places = places_of(source, readers, format=format)
    found = [(place, readers[place.format].read(place.path)) for place in places]
    steps = _steps(found, step)
    for place, content in found:
        _check(place, content)
    return _write(
        history_path(history), source, sorted(zip(steps, found, strict=True), key=lambda one: one[0]), quiet=quiet
    )


def _steps(found: Sequence[tuple["Place", "Found"]], given: int | None) -> list[int]:
    if given is not None and len(found) > 1:
        names = ", ".join(place.path.name for place, _ in found[:3])
        raise SetupError(
            f"step={given} is for one checkpoint, but there are {len(found)}: {names}; import one, or leave it out"
        )
    steps = []
    for place, content in found:
        step = next((one for one in (given, place.step, content.step) if one is not None), None)
        if step is None or step < 0:
            raise SetupError(
                f"the step of {place.path} is not known: pass step=, or name it like global_step100 or checkpoint-100"
            )
        steps.append(step)
    for step, count in Counter(steps).items():
        if count > 1:
            twice = [str(place.path) for (place, _), one in zip(found, steps, strict=True) if one == step]
            raise SetupError(f"{' and '.join(twice[:3])} are all of step {step}: import one of them")
    return steps


def _check(place: "Place", found: "Found") -> None:
    """FormatError for names that a history can't tell apart, or that it uses for itself."""
    from catalog.format.manifest import NOT_STATE

    if not found.tensors:
        raise FormatError(f"{place.path} ({place.format}) has no tensors")
    keys = Counter(f"{tensor.kind}/{tensor.name}" for tensor in found.tensors)
    wrong = [key for key, count in keys.items() if count > 1 or key.partition("/")[0] in NOT_STATE]
    if wrong:
        raise FormatError(
            f"{place.path} ({place.format}): the tensor {wrong[0]!r} stands twice, or has a name that is taken"
        )


def _write(root: Path, source: Path, found: list[tuple[int, tuple["Place", "Found"]]], *, quiet: bool) -> "Table":
    import pyarrow as pa

    from catalog.index import index
    from catalog.records import RunFacts
    from catalog.run_writer import RunWriter, create_history, create_run, new_run_id
    from dshistory.conversion.importing.writer import Places, write_checkpoint
    from dshistory.display.progress import ByteProgress
    from dshistory.display.table import Table

    create_history(root)
    run = new_run_id()
    formats = sorted({place.format for _, (place, _) in found})
    facts = {**found[0][1][1].facts, "imported": {"from": str(source), "formats": formats}}
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    create_run(root, RunFacts(run, created, 1, None, None, "imported", facts))
    rows: list[dict[str, Any]] = []
    total = sum(tensor.nbytes for _, (_, content) in found for tensor in content.tensors)
    with (
        RunWriter(root, run=run, rank=0, world_size=1, layout_hash="imported") as writer,
        ByteProgress(total, description="import", quiet=quiet) as bar,
    ):
        before: Places = {}
        for step, (place, content) in found:
            before = write_checkpoint(writer, step, content, before=before, advance=bar.advance)
            rows.append(
                {
                    "step": step,
                    "run": run,
                    "format": place.format,
                    "tensors": len(content.tensors),
                    "bytes": sum(tensor.nbytes for tensor in content.tensors),
                    "left_out": ", ".join(content.left_out) or None,
                    "from": str(place.path),
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
