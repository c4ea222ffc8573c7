"""Makes an ordinary DeepSpeed checkpoint folder, of files of torch.save, of one from `capture.checkpoint_engine`.

Nothing is unpickled for it: the files are read as data, and what was saved as a pickle is handed on as it is."""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zipfile import is_zipfile

from catalog.errors import FormatError, NotFoundError, UnsupportedError
from dshistory.registry import verb

if TYPE_CHECKING:
    from dshistory.display.table import Table

__all__ = ["convert"]

_RECEIPT: Final = ".dshistory-"


@verb("convert checkpoints/", "convert checkpoints/ --to ordinary", needs_history=False)
def convert(path: Path | str, *, to: Path | str | None = None, overwrite: bool = False, quiet: bool = False) -> "Table":
    """Make an ordinary DeepSpeed checkpoint of a folder that capture.checkpoint_engine saved: a row for each file.

    Plain DeepSpeed loads what is written, and zero_to_fp32.py and ds_to_universal.py read it. Every byte is verified,
    no code in the files is executed, and DeepSpeed need not be installed. Files that are ordinary already are copied.
    The folder appears whole or not at all. Raises NotFoundError when there is nothing to convert, SetupError when the
    new folder exists, CorruptError and FormatError, with the file and the field, for a damaged file, and for one that a
    rank has written and that is missing.

    Args:
        path: the folder that engine.save_checkpoint was given, with all its tags, or that of one tag
        to: the folder to write; default: beside the folder, its name followed by -deepspeed
        overwrite: replace what exists there
        quiet: no progress bar
    """
    import pyarrow as pa

    from dshistory.conversion.rank_parts import require_all_parts
    from dshistory.conversion.target import new_target
    from dshistory.display.progress import ByteProgress
    from dshistory.display.table import Table

    source = Path(path).expanduser().absolute()
    final = source.with_name(f"{source.name}-deepspeed") if to is None else Path(to).expanduser().absolute()
    files = list(_files(source))
    ours = {file for file in files if _is_ours(file)}
    for file in files:
        if file.suffix == ".pt" and file not in ours and not is_zipfile(file):
            raise FormatError(
                f"{file} is neither a file of capture.checkpoint_engine nor one of torch.save: it is damaged; take "
                "another save, or move it out of the folder to convert the rest"
            )
    if not ours:
        raise NotFoundError(
            f"nothing to convert at {source}: none of its {len(files)} files was saved through "
            "capture.checkpoint_engine; DeepSpeed reads it as it is"
        )
    rows, total = [], sum(file.stat().st_size for file in files)
    with (
        new_target(final, what="convert", source=("folder", source), overwrite=overwrite) as target,
        ByteProgress(total, description="convert", quiet=quiet) as bar,
    ):
        counts: dict[Path, int] = {}
        for file in files:
            written = target / file.relative_to(source)
            written.parent.mkdir(parents=True, exist_ok=True)
            if _write(file, written, counts, converting=file in ours):
                rows.append(
                    {
                        "file": str(final / file.relative_to(source)),
                        "bytes": written.stat().st_size,
                        "converted": file in ours,
                    }
                )
            bar.advance(file.stat().st_size)
        for folder in sorted({file.parent for file in files}):
            here = [file.name for file in files if file.parent == folder]
            require_all_parts(folder, here, counts.get(folder))
    schema = pa.schema([("file", pa.string()), ("bytes", pa.int64()), ("converted", pa.bool_())])
    note = f"{final} is an ordinary DeepSpeed checkpoint: {len(ours)} files converted, {len(files) - len(ours)} copied"
    if len(rows) < len(files):
        note += "; zero_to_fp32.py is left out, because DeepSpeed, whose program it is, is not installed here"
    return Table(pa.Table.from_pylist(rows, schema=schema), formats={"bytes": "bytes"}, note=note)


def _files(source: Path) -> Iterator[Path]:
    """Yield the files below the folder, in order, without those that only `capture.checkpoint_engine` needs."""
    from catalog.disk.durable import is_temporary

    if not source.is_dir():
        raise NotFoundError(f"nothing to convert at {source}: it is not a folder")
    for file in sorted(source.rglob("*")):
        if file.is_symlink() and file.is_dir():
            raise UnsupportedError(
                f"{file} is a symbolic link to a folder, which is not followed: put the folder there"
            )
        if file.is_dir() or is_temporary(file.name) or file.name.startswith(_RECEIPT):
            continue
        if not file.is_file():
            raise UnsupportedError(f"{file} is not a regular file: move it out of the folder to convert the rest")
        yield file


def _is_ours(file: Path) -> bool:
    from capture.deepspeed_checkpoints.file import is_tree_file
    from capture.deepspeed_checkpoints.fp32_program import is_program

    return is_tree_file(file) or is_program(file)


def _write(file: Path, target: Path, counts: dict[Path, int], *, converting: bool) -> bool:
    """Write one file as DeepSpeed has it, and return whether there is one. `counts` gets the number of ranks that have
    written its folder, where the file tells."""
    from capture.deepspeed_checkpoints.fp32_program import is_program
    from dshistory.conversion.deepspeed_files import load_tree_file, save_deepspeed_file
    from dshistory.conversion.rank_parts import partition_count

    if is_program(file):
        original = _deepspeeds_program(file.name)
        if original is None:
            return False
        shutil.copyfile(original, target)
    elif converting:
        content = load_tree_file(file)
        count = partition_count(content)
        if count is not None:
            counts[file.parent] = count
        save_deepspeed_file(content, target)
    else:
        shutil.copyfile(file, target)
    shutil.copymode(file, target)
    return True


def _deepspeeds_program(name: str) -> Path | None:
    """Return DeepSpeed's own program where it is installed, without importing it."""
    found = find_spec("deepspeed")
    places = () if found is None else found.submodule_search_locations or ()
    return next((path for place in places for path in [Path(place) / "utils" / name] if path.is_file()), None)
