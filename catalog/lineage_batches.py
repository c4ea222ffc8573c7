"""The digests of the batches of a lineage: those of a run, and before its fork those of its parents."""

from typing import Final, NamedTuple

from catalog.lineage_query import lineage_query
from catalog.paths import HistoryPaths

__all__ = ["Batch", "lineage_batches"]

_BATCHES: Final = """
SELECT step, rank, arg_min(detail ->> 'hash', (age, -epoch_us(time))) AS hash,
    arg_min(detail ->> 'reader', (age, -epoch_us(time))) AS reader
FROM events JOIN generations USING (run)
WHERE name = 'batch' AND (until IS NULL OR step <= until)
GROUP BY step, rank ORDER BY step, rank
"""


class Batch(NamedTuple):
    """The digest of what a rank trained on at a step. Those of two readers, "host" and "device", are not comparable."""

    digest: str
    reader: str


def lineage_batches(paths: HistoryPaths, run: str) -> dict[int, dict[int, Batch]]:
    """Return the digest of each step's batch by step and rank, of a run and its parents; where two of the runs have the
    same step, that of the descendant counts. Steps whose batch is not known are left out. NotFoundError when there is
    no such run.
    """
    found: dict[int, dict[int, Batch]] = {}
    for row in lineage_query(paths, run, _BATCHES):
        found.setdefault(row["step"], {})[row["rank"]] = Batch(row["hash"], row["reader"])
    return found
