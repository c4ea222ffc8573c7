"""What is out of line in a run: each kind of trouble with the step and tensor where it is first seen.

All from the statistics and sketches that the catalog has; nothing is read. "Out of line" is against the tensor's own past: five
times more than in any of the eight checkpoints before, of which there must be three at least.
"""

from typing import Final

from catalog.history import History
from catalog.resolve import lineage
from dshistory.table import Table

__all__ = ["anomalies"]

_SQL: Final = """
WITH path AS (
    SELECT unnest($runs) AS run, unnest($steps) AS step, unnest(range(len($runs))) AS place
), figures AS (
    SELECT path.place, s.run, s.step, s.kind, s.name, s.norm, s.nan + s.inf AS nonfinite, s.zeros, s.numel,
           greatest(abs(s.min), abs(s.max)) AS largest, k.sketch,
           lag(s.norm) OVER past AS norm_before, lag(s.nan + s.inf) OVER past AS nonfinite_before,
           lag(s.zeros) OVER past AS zeros_before, lag(k.sketch) OVER past AS sketch_before
    FROM statistics s JOIN path ON s.run = path.run AND s.step = path.step
    LEFT JOIN sketches k ON k.run = s.run AND k.step = s.step AND k.kind = s.kind AND k.name = s.name
    WINDOW past AS (PARTITION BY s.kind, s.name ORDER BY path.place)
), moves AS (
    SELECT *, CASE WHEN norm > 0 AND norm_before > 0 AND nonfinite + nonfinite_before = 0 THEN abs(ln(norm / norm_before)) END AS jump,
           CASE WHEN norm_before > 0 AND nonfinite + nonfinite_before = 0 AND len(sketch) = len(sketch_before)
                THEN list_distance(sketch, sketch_before) / norm_before END AS update_ratio
    FROM figures
), against AS (
    SELECT *, max(jump) OVER earlier AS jumps, max(update_ratio) OVER earlier AS ratios, max(largest) OVER earlier AS largests,
           count(*) OVER earlier AS past
    FROM moves WINDOW earlier AS (PARTITION BY kind, name ORDER BY place ROWS BETWEEN 8 PRECEDING AND 1 PRECEDING)
), found AS (
    SELECT place, run, step, kind, name, 'not finite' AS anomaly, nonfinite::DOUBLE AS value, 0.0 AS usual FROM against
    WHERE nonfinite > 0 AND coalesce(nonfinite_before, 0) = 0
    UNION ALL
    SELECT place, run, step, kind, name, 'norm jumps', exp(jump), exp(jumps) FROM against
    WHERE kind IN ('model', 'master', 'buffer') AND past >= 3 AND jump > 0.01 AND jump > 5 * jumps
    UNION ALL
    SELECT place, run, step, kind, name, 'large update', update_ratio, ratios FROM against
    WHERE kind IN ('model', 'master') AND past >= 3 AND update_ratio > 5 * ratios
    UNION ALL
    SELECT place, run, step, kind, name, 'second moment explodes', largest, largests FROM against
    WHERE kind = 'exp_avg_sq' AND past >= 3 AND largest > 100 * largests AND largests > 0
    UNION ALL
    SELECT place, run, step, kind, name, 'goes to zero', zeros / numel, zeros_before / numel FROM against
    WHERE kind IN ('model', 'master') AND numel > 1 AND zeros >= 0.5 * numel AND zeros_before < 0.5 * numel
)
SELECT run, step, anomaly, kind, name, value, usual FROM found
QUALIFY row_number() OVER (PARTITION BY anomaly, kind, name ORDER BY place) = 1
ORDER BY place, anomaly <> 'not finite', anomaly, value DESC, kind, name
"""


def anomalies(history: History, *, run: str | None) -> Table:
    """See `Explorer.anomalies`."""
    run = run or history.current_run()
    refs = lineage(history, run)
    params = {"runs": [ref.run for ref in refs], "steps": [ref.step for ref in refs]}
    table = history.query(_SQL, params)
    known = history.query(
        "SELECT count(DISTINCT (run, step)) AS n FROM statistics WHERE list_contains($runs, run)",
        {"runs": params["runs"]},
    )
    analyzed = known["n"][0].as_py()
    if analyzed >= len(refs):
        note = f"{table.num_rows} anomalies in {len(refs)} checkpoints"
    else:
        note = (
            f"{table.num_rows} anomalies in the {analyzed} of {len(refs)} checkpoints that have statistics; `analyze` computes the "
            "others"
        )
    return Table(table, note=note)
