"""Tables as plain text: aligned columns, human units, and only the first and last rows of long tables.

A narrow terminal takes from a table what is worth least: first the columns that its `Layout` names, then the middle of
long texts, and only then its last columns.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as types

from dshistory.display.formats import Format, text_of

__all__ = ["Layout", "Page", "is_numeric", "table_text", "terminal_width"]

FIRST_ROWS = 20
LAST_ROWS = 5
SHOWN_WHOLE = 30
_CELL_WIDTH = 96
_LEAST_CELL_WIDTH = 24
_FEW_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of columns in text.

    in_title: columns that stand in a line above the table while all rows have the same value, such as a lone run
    gives_way: columns that are left out when all do not fit, the first one first, after those without any value
    """

    in_title: tuple[str, ...] = ()
    gives_way: tuple[str, ...] = ()


class Page:
    """The displayed part of a table: all rows when there are few or it is shown `whole`, else the first and the last;
    `left_out` counts the rest."""

    def __init__(self, data: pa.Table, formats: Mapping[str, Format], *, whole: bool = False) -> None:
        rows = data.num_rows
        self.left_out = rows - FIRST_ROWS - LAST_ROWS if rows > SHOWN_WHOLE and not whole else 0
        first = data if not self.left_out else data.slice(0, FIRST_ROWS)
        last = data.slice(rows - LAST_ROWS) if self.left_out else data.slice(rows)
        self.columns = [text_of(name) for name in data.column_names]
        self.first = _cells(first, formats)
        self.last = _cells(last, formats)

    @property
    def gap(self) -> str:
        """The line in place of the rows that are left out."""
        return f"… {self.left_out:,} rows left out; .top(n), slices and .to_pandas() show them …"


def is_numeric(kind: pa.DataType) -> bool:
    """Return whether a column is aligned to the right."""
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def terminal_width() -> int | None:
    """Return the width of the terminal in characters; None in notebooks, pipes and files, which have no limit."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def table_text(
    data: pa.Table,
    formats: Mapping[str, Format],
    note: str,
    *,
    layout: Layout | None = None,
    width: int | None = None,
    whole: bool = False,
) -> str:
    """Return the table as aligned text without a trailing newline.

    Columns that do not fit into `width` are only named under the table. With `whole` no row is left out, and without a
    width no value is cut. An empty table is its note, or "(no rows)"."""
    if not data.num_rows:
        return text_of(note) if note else "(no rows)"
    layout = layout or Layout()
    title, data = _titled(data, layout)
    page = Page(data, formats, whole=whole)
    rows = [page.columns, *page.first, *page.last]
    right = [is_numeric(field.type) for field in data.schema]
    most = None if whole else _CELL_WIDTH
    kept, limits = _fitting(rows, right, [*_empty(rows), *_places(data, layout.gives_way)], width, most)
    shown = [[_short(row[i], limit) for i, limit in zip(kept, limits, strict=True)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = [_line(row, widths, [right[i] for i in kept]) for row in shown]
    lines.insert(1, "  ".join("-" * min(wide, _CELL_WIDTH) for wide in widths))
    if page.left_out:
        lines.insert(2 + FIRST_ROWS, page.gap)
    if title:
        lines.insert(0, title)
    if len(kept) < data.num_columns:
        lines.append(f"… too narrow for {', '.join(name for i, name in enumerate(page.columns) if i not in kept)} …")
    if any(len(row[i]) > limit for row in rows for i, limit in zip(kept, limits, strict=True)):
        lines.append("… replaces the middle of long values; rows, .to_csv() and .to_pandas() have them whole …")
    return "\n".join([*lines, *([text_of(note)] if note else [])])


def _titled(data: pa.Table, layout: Layout) -> tuple[str, pa.Table]:
    """Return the line above the table, which may be empty, and the table without the columns that stand there."""
    lone = [name for name in layout.in_title if name in data.column_names and len(data[name].unique()) == 1]
    title = ", ".join(f"{name} {text_of(data[name][0].as_py())}" for name in lone)
    return title, data.drop_columns(lone)


def _empty(rows: Sequence[Sequence[str]]) -> list[int]:
    return [place for place in range(len(rows[0])) if not any(row[place] for row in rows[1:])]


def _places(data: pa.Table, names: Sequence[str]) -> list[int]:
    return [data.column_names.index(name) for name in names if name in data.column_names]


def _fitting(
    rows: Sequence[Sequence[str]], right: Sequence[bool], gives_way: Sequence[int], width: int | None, most: int | None
) -> tuple[list[int], list[int]]:
    """Return the columns to show, and the longest cell of each: all that fit into `width`, but at least a few, because
    a long line is better than none. No cell is longer than `most`; those of the last column are never cut: it may be a
    message.
    """
    kept = list(range(len(right)))
    longest = [max(len(row[i]) for row in rows) for i in kept]
    wanted = [size if most is None else min(size, most) for size in longest[:-1]] + longest[-1:]
    if width is None:
        return kept, wanted

    def missing() -> int:
        return sum(wanted[i] + 2 for i in kept) - 2 - width

    for place in gives_way:
        if place in kept and missing() > 0 and len(kept) > _FEW_COLUMNS:
            kept.remove(place)
    for place in sorted((i for i in kept[:-1] if not right[i]), key=wanted.__getitem__, reverse=True):
        if missing() > 0:
            wanted[place] = max(wanted[place] - missing(), min(wanted[place], _LEAST_CELL_WIDTH))
    while missing() > 0 and len(kept) > _FEW_COLUMNS:
        kept.pop()
    return kept, [wanted[i] for i in kept]


def _cells(data: pa.Table, formats: Mapping[str, Format]) -> list[list[str]]:
    columns = [
        [text_of(value, formats.get(name, "auto")) for value in column.to_pylist()]
        for name, column in zip(data.column_names, data.columns, strict=True)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = (
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(row, widths, right, strict=False)
    )
    return "  ".join(cells).rstrip()


def _short(cell: str, limit: int) -> str:
    """Shorten a long cell in its middle, because the beginning and the end distinguish names."""
    if len(cell) <= limit:
        return cell
    half = (limit - 1) // 2
    return f"{cell[: limit - 1 - half]}…{cell[len(cell) - half :]}"
