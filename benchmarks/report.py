"""Results as Markdown for people and as JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measure import Rows, Series

UNITS = {"": 1.0, "B": 1.0, "s": 1.0, "ms": 1e-3, "x": 1.0, "%": 0.01, "MB": 1e6, "GB": 1e9, "MB/s": 1e6, "GB/s": 1e9}


def markdown(
    title: str,
    note: str,
    rows: Rows,
    columns: Mapping[str, str],
    machine: Mapping[str, object],
    *,
    skipped: Mapping[str, str],
) -> str:
    """Return one table with a row per contender and "median (min-max)" per column.

    `columns` maps the name of a column to its unit. A contender in `skipped` has a row with the reason.
    """
    lines = [
        f"# {title}",
        "",
        note,
        "",
        "| |" + "".join(f" {_heading(name, unit)} |" for name, unit in columns.items()),
    ]
    lines.append("|---|" + "---:|" * len(columns))
    for contender, figures in rows.items():
        cells = [_cell(figures.get(name), UNITS[unit]) for name, unit in columns.items()]
        lines.append(f"| {contender} | " + " | ".join(cells) + " |")
    lines += [f"| {contender} | {reason} |" + " |" * (len(columns) - 1) for contender, reason in skipped.items()]
    lines += ["", "Median (smallest-largest) over all rotations. Measured on:", ""]
    lines += [f"- {key.replace('_', ' ')}: {_plain(value)}" for key, value in machine.items()]
    return "\n".join(lines) + "\n"


def write(
    name: str, folder: Path, text: str, rows: Rows, settings: Mapping[str, object], machine: Mapping[str, object]
) -> None:
    """Write `name`.md and `name`.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {who: {what: series.as_json() for what, series in row.items()} for who, row in rows.items()}
    (folder / f"{name}.md").write_text(text)
    document = {"machine": machine, "settings": settings, "results": figures}
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def _heading(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


def _cell(series: Series | None, scale: float) -> str:
    if series is None or not series.values:
        return "-"
    low, middle, high = (_number(value / scale) for value in (min(series.values), series.median, max(series.values)))
    return f"{middle} ({low}-{high})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
