"""Questions about a lineage in SQL: about a run, and before its fork about its parents.

Checkpoints are a part of the steps only, so the forks decide what belongs to a lineage and not the checkpoints that it
has.
"""

from collections.abc import Mapping
from typing import Any, Final

from catalog.index import index
from catalog.paths import HistoryPaths
from catalog.references import generations

__all__ = ["lineage_query"]

_GENERATIONS: Final = """
WITH generations AS (SELECT unnest($runs) AS run, unnest($limits)::BIGINT AS until, unnest($ages) AS age)
"""


def lineage_query(
    paths: HistoryPaths, run: str, select: str, parameters: Mapping[str, object] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a SELECT that may join `generations`: a run and its parents, `age` 0 for the run itself, 1 for
    its parent and so on, and `until`, the last step that belongs to the lineage; NULL for the run itself. NotFoundError
    when there is no such run.
    """
    runs, limits = zip(*generations(paths, run), strict=True)
    lineage = {"runs": list(runs), "limits": list(limits), "ages": list(range(len(runs)))}
    rows: list[dict[str, Any]] = index.query(
        paths, _GENERATIONS + select, {**lineage, **(parameters or {})}
    ).to_pylist()
    return rows
