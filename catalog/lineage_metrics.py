"""The metrics of a lineage: those of a run, and before its fork those of its parents."""

from collections.abc import Collection
from typing import Final

from catalog.lineage_query import lineage_query
from catalog.paths import HistoryPaths

__all__ = ["lineage_metrics"]

_METRICS: Final = """
SELECT name, step, arg_min(value, age) AS value FROM metrics JOIN generations USING (run)
WHERE (until IS NULL OR step <= until) AND ($names IS NULL OR list_contains($names, name))
GROUP BY name, step ORDER BY name, step
"""


def lineage_metrics(paths: HistoryPaths, run: str, names: Collection[str] | None = None) -> dict[str, dict[int, float]]:
    """Return the metrics of a run and its parents by name and step, the steps ascending; `names`: only these. Where two
    of the runs have a value of the same step, that of the descendant counts. NotFoundError when there is no such run.
    """
    wanted = {"names": None if names is None else list(names)}
    found: dict[str, dict[int, float]] = {}
    for row in lineage_query(paths, run, _METRICS, wanted):
        found.setdefault(row["name"], {})[row["step"]] = row["value"]
    return found
