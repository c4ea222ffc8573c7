"""The table of what a compaction has packed, and what it has left."""

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from catalog.compaction.compact import Compacted, compact_run
from catalog.data_files.data_files import data_file_bytes, only_packed
from catalog.errors import HistoryError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.display.formats import Format, counted, text_of
from dshistory.display.progress import ByteProgress
from dshistory.display.table import Table
from dshistory.display.text import Layout

__all__ = ["compact"]

_SCHEMA: Final = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int64()),
        ("base", pa.int64()),
        ("before", pa.int64()),
        ("bytes", pa.int64()),
        ("ratio", pa.float64()),
    ]
)
_FORMATS: Final[dict[str, Format]] = {"before": "bytes", "bytes": "bytes", "ratio": "share"}
_LAYOUT: Final = Layout(in_title=("run",), gives_way=("run",))
_SHOWN: Final = 3


def compact(
    history: History, refs: Sequence[CheckpointRef] | None, *, run: str | None, key_every: int, newest: int, quiet: bool
) -> Table:
    """See `Explorer.compact`."""
    if key_every < 1:
        raise SetupError(f"compact: key_every={key_every}: of at least 1 checkpoint one is a key frame")
    if newest < 0:
        raise SetupError(f"compact: newest={newest}: give how many stay as they are, 0 or more")
    chosen = _by_run(history, refs, run, newest)
    done = Compacted()
    skipped = []
    with ByteProgress(_raw_bytes(history, chosen), description="compact", quiet=quiet) as bar:
        for name, wanted in chosen.items():
            try:
                found = compact_run(history, name, wanted, key_every=key_every, progress=bar.advance)
            except HistoryError as error:
                if refs is not None or run is not None:
                    raise
                skipped.append(str(error))
                continue
            done.steps += found.steps
            done.left |= found.left
    rows = [
        {
            "run": one.ref.run,
            "step": one.ref.step,
            "base": one.base,
            "before": one.raw_bytes,
            "bytes": one.packed_bytes,
            "ratio": one.packed_bytes / max(1, one.raw_bytes),
        }
        for one in done.steps
    ]
    return Table(
        pa.Table.from_pylist(rows, schema=_SCHEMA), formats=_FORMATS, layout=_LAYOUT, note=_note(done, skipped)
    )


def _by_run(
    history: History, refs: Sequence[CheckpointRef] | None, run: str | None, newest: int
) -> dict[str, list[int]]:
    if refs is None:
        runs = [facts.run for facts in history.runs()] if run is None else [run]
        lines = {name: history.steps(name) for name in runs}
        return {name: line[: max(0, len(line) - newest)] for name, line in lines.items()}
    chosen: defaultdict[str, list[int]] = defaultdict(list)
    for ref in refs:
        chosen[ref.run].append(ref.step)
    return chosen


def _raw_bytes(history: History, chosen: dict[str, list[int]]) -> int:
    """Return how much there is to pack, as far as that is known."""
    total = 0
    for run, steps in chosen.items():
        for step in steps:
            # What is damaged is left, with the reason, when its turn comes.
            with contextlib.suppress(HistoryError, OSError):
                for part in history.marker(CheckpointRef(run, step)).parts:
                    if not only_packed(history.root, [part.data]):
                        total += data_file_bytes(history.root, part.data)
    return total


def _note(done: Compacted, skipped: list[str]) -> str:
    before = sum(one.raw_bytes for one in done.steps)
    after = sum(one.packed_bytes for one in done.steps)
    parts = [
        f"{counted(len(done.steps), 'checkpoint')} packed: {text_of(before, 'bytes')} take {text_of(after, 'bytes')}"
        if done.steps
        else "nothing to pack"
    ]
    left = [f"{ref} was left: {reason}" for ref, reason in done.left.items()]
    return "; ".join([*parts, *left[:_SHOWN], *skipped])
