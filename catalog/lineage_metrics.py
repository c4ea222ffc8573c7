"""The metrics of a lineage: those of a run, and before its fork those of its parents.

Checkpoints are a part of the steps only, so the forks decide what belongs to a lineage and not the checkpoints that it
has.
"""

from collections.abc import Collection
from typing import Final

from catalog.index import index
from catalog.paths import HistoryPaths
from catalog.references import generations

__all__ = ["lineage_metrics"]

_METRICS: Final = """
WITH generations AS (SELECT unnest($runs) AS run, unnest($limits)::BIGINT AS until, unnest($ages) AS age)
SELECT name, step, arg_min(value, age) AS value FROM metrics JOIN generations USING (run)
WHERE (until IS NULL OR step <= until) AND ($names IS NULL OR list_contains($names, name))
GROUP BY name, step ORDER BY name, step
"""


def lineage_metrics(paths: HistoryPaths, run: str, names: Collection[str] | None = None) -> dict[str, dict[int, float]]:
    """Return the metrics of a run and its parents by name and step, the steps ascending; `names`: only these. Where two
    of the runs have a value of the same step, that of the descendant counts. NotFoundError when there is no such run.
    """
    runs, limits = zip(*generations(paths, run), strict=True)
    parameters = {
        "runs": list(runs),
        "limits": list(limits),
        "ages": list(range(len(runs))),
        "names": None if names is None else list(names),
    }
    found: dict[str, dict[int, float]] = {}
    for row in index.query(paths, _METRICS, parameters).to_pylist():
        found.setdefault(row["name"], {})[row["step"]] = row["value"]
    return found
