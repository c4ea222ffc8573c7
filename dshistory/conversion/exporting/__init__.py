"""Writes checkpoints in the formats of other programs: one writer for each format, chosen by name."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from catalog.errors import SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.conversion.exporting.options import Options
from dshistory.conversion.exporting.weights import T, Weights
from dshistory.conversion.target import new_target
from dshistory.display.progress import ByteProgress
from dshistory.display.table import Table
from dshistory.tensors.checkpoint_tensors import CheckpointTensors

__all__ = ["FORMATS", "WITH_OPTIMIZER", "export", "export_weights", "options", "resume_folder"]

FORMATS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "safetensors": ("dshistory.conversion.exporting.safetensors", "write_safetensors"),
        "torch": ("dshistory.conversion.exporting.torchfile", "write_torch"),
        "dcp": ("dshistory.conversion.exporting.dcp", "write_dcp"),
        "huggingface": ("dshistory.conversion.exporting.huggingface", "write_huggingface"),
        "deepspeed": ("dshistory.conversion.exporting.deepspeed", "write_deepspeed"),
        "universal": ("dshistory.conversion.exporting.universal", "write_universal"),
    }
)
"""Format -> module and function; `function(checkpoint, target, options)` writes it at `target`, which does not exist
yet.
"""

WITH_OPTIMIZER = ("deepspeed", "universal")
"""The formats that hold an optimizer too."""

_SCHEMA = pa.schema([("file", pa.string()), ("bytes", pa.int64())])


def options(
    *,
    weights: str,
    shard_bytes: int | None,
    config: Path | str | None,
    model: Any,
    zero_stage: int | None,
    world_size: int | None,
) -> Options:
    """Return the checked options of `Explorer.export`. SetupError when they contradict each other."""
    if config is not None and model is not None:
        raise SetupError("pass config= or model=, not both: each says what the configuration is")
    content = config if model is None else _config_of(model)
    return Options(
        weights=weights,
        shard_bytes=shard_bytes,
        config=content,
        zero_stage=zero_stage,
        world_size=world_size,
    )


def _config_of(model: Any) -> dict[str, Any]:
    """Return the content of a Hugging Face configuration, given itself or as a model's `config`."""
    described = getattr(model, "config", model)
    if not hasattr(described, "to_dict"):
        raise SetupError(
            f"model= must be a Hugging Face model or configuration, not a {type(model).__name__}: it has no to_dict"
        )
    content: dict[str, Any] = described.to_dict()
    # save_pretrained does the same: from_pretrained finds the class by it.
    content.setdefault("architectures", [type(model).__name__] if described is not model else None)
    return content


def export(
    history: History,
    ref: CheckpointRef,
    path: Path,
    *,
    format: str,
    options: Options,
    overwrite: bool,
    quiet: bool,
) -> Table:
    """See `Explorer.export`."""
    write = _writer(format)
    with new_target(path, what="export", source=("history", history.root), overwrite=overwrite) as target:
        checkpoint = CheckpointTensors(history, ref, advance=lambda nbytes: bar.advance(nbytes))
        with ByteProgress(checkpoint.nbytes, description=f"export to {format}", quiet=quiet) as bar:
            write(checkpoint, target, options)
        files = _files(target)
    return _table(path, files, note=f"checkpoint {ref} as {format} at {path}")


def export_weights(
    weights: Weights[T], path: Path, *, root: Path, format: str, options: Options, overwrite: bool
) -> Table:
    """Write weights that are in memory, as `export` writes those of a checkpoint of the history at `root`. SetupError
    for a format that holds an optimizer too."""
    write = _writer(format)
    if format in WITH_OPTIMIZER:
        raise SetupError(
            f"the format {format!r} holds an optimizer too, which {weights.ref} does not have; the others are "
            f"{', '.join(name for name in FORMATS if name not in WITH_OPTIMIZER)}"
        )
    with new_target(path, what="export", source=("history", root), overwrite=overwrite) as target:
        write(weights, target, options)
        files = _files(target)
    return _table(path, files, note=f"{weights.ref} as {format} at {path}")


def _writer(format: str) -> Callable[[Any, Path, Options], None]:
    if format not in FORMATS:
        raise SetupError(f"there is no format {format!r}; the formats are {', '.join(FORMATS)}")
    module, function = FORMATS[format]
    write: Callable[[Any, Path, Options], None] = getattr(import_module(module), function)
    return write


def _table(path: Path, files: Sequence[tuple[str, int]], *, note: str) -> Table:
    rows: list[dict[str, Any]] = [{"file": str(path / name), "bytes": nbytes} for name, nbytes in files]
    return Table(pa.Table.from_pylist(rows, schema=_SCHEMA), formats={"bytes": "bytes"}, note=note)


def resume_folder(history: History, ref: CheckpointRef, path: Path, *, overwrite: bool, quiet: bool) -> None:
    """See `Explorer.resume_folder`."""
    from dshistory.conversion.exporting.trainer import write_trainer_folder

    with new_target(path, what="resume_folder", source=("history", history.root), overwrite=overwrite) as target:
        total = sum(extent.nbytes for extent in history.extents(ref))
        with ByteProgress(total, description="resume_folder", quiet=quiet) as bar:
            write_trainer_folder(history, CheckpointTensors(history, ref, advance=bar.advance), target)


def _files(target: Path) -> list[tuple[str, int]]:
    """Return the files below `target`, or `target` itself under the empty name, with their sizes."""
    if target.is_file():
        return [("", target.stat().st_size)]
    found = sorted(path for path in target.rglob("*") if path.is_file())
    return [(path.relative_to(target).as_posix(), path.stat().st_size) for path in found]
