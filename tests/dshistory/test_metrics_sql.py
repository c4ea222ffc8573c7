"""Values that SQL and the catalog compute equal those of `dshistory.metrics` on the same data."""

import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from explorer_helpers import Run, whole

from catalog.history import History
from catalog.records import CheckpointRef
from catalog.statistics.compute import analyze_part, missing_parts
from catalog.statistics.updates import with_updates
from dshistory import Explorer, metrics
from dshistory.comparison.grouping import grouped
from dshistory.comparison.sketch_estimates import estimated
from dshistory.trends.statistics_matrix import StatisticsMatrix

STEPS = (0, 10, 20)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Three analyzed checkpoints hold ordinary, tiny, zero, empty and scalar tensors, some with NaN or infinities."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    large, small = drawn(400), 1e-30 * drawn(400)
    tensors = {
        "plain": [large, large + 0.1 * drawn(400), large + 0.3 * drawn(400)],
        "tiny": [small, 1.1 * small, small + 1e-31 * drawn(400)],
        "turned": [large, -large, large],
        "same": [large, large, large],
        "zero": [torch.zeros(100)] * 3,
        "out of zero": [torch.zeros(100), torch.ones(100), torch.zeros(100)],
        "empty": [torch.empty(0)] * 3,
        "scalar": [torch.tensor(2.0), torch.tensor(0.0), torch.tensor(-2.0)],
        "nan once": [torch.ones(100), torch.tensor([math.nan] * 3 + [1.0] * 97), torch.ones(100)],
        "infinite once": [torch.ones(100), torch.tensor([math.inf, -math.inf] + [1.0] * 98), torch.ones(100)],
        "all nan": [torch.full((50,), math.nan)] * 3,
        "all infinite": [torch.full((50,), math.inf)] * 3,
        "overflows": [torch.full((50,), 1e200, dtype=torch.float64)] * 3,
    }
    root = tmp_path_factory.mktemp("sql") / "h"
    run = Run(root)
    for at, step in enumerate(STEPS):
        run.checkpoint(step, whole({name: states[at] for name, states in tensors.items()}))
    run.close()
    explorer = Explorer.open(root)
    for step in STEPS:
        (part,) = missing_parts(explorer.history.paths, CheckpointRef("run-a", step))
        analyze_part(explorer.history.paths, "run-a", part)
    explorer.reindex()
    return root


@pytest.fixture
def rows(root):
    """Return the view `statistics` column by column, with null as NaN."""
    table = History.open(root).query("SELECT * FROM statistics ORDER BY step, name")
    names = ("numel", "finite", "zeros", "sum", "sum_of_squares", "norm", "rms", "mean")
    names += ("norm_before", "update_norm", "cosine", "relative_update")
    return {name: table[name].cast("float64").to_numpy() for name in names}


def test_the_view_of_statistics(rows):
    assert len(rows["numel"]) == 13 * len(STEPS)
    np.testing.assert_array_equal(rows["norm"], metrics.norm(rows["sum_of_squares"]))
    np.testing.assert_array_equal(rows["mean"], metrics.mean(rows["sum"], rows["finite"]))
    np.testing.assert_array_equal(rows["rms"], metrics.rms(rows["sum_of_squares"], rows["finite"]))
    relative = metrics.relative_update(np.square(rows["update_norm"]), np.square(rows["norm_before"]))
    np.testing.assert_array_equal(rows["relative_update"], relative)
    assert np.isinf(rows["relative_update"]).any()
    assert (rows["relative_update"] == 0).any()


def merged_statistics(sketches, **columns):
    """Return merged statistics of one checkpoint as the catalog holds them.

    The tensors are finite unless `columns` say otherwise.
    """
    names = list(sketches)
    table = {
        "kind": ["model"] * len(names),
        "name": names,
        "nan": [0] * len(names),
        "inf": [0] * len(names),
        "sum_of_squares": [float(np.square(sketch).sum()) for sketch in sketches.values()],
        "sketch": pa.array([list(map(float, sketch)) for sketch in sketches.values()], pa.list_(pa.float64())),
    }
    return pa.table(table | columns)


def test_updates_at_registration():
    """The columns that the catalog adds equal the same sums over buckets."""
    draw = np.random.default_rng(0)
    plain, tiny, zero = draw.normal(size=64), 1e-90 * draw.normal(size=16), np.zeros(16)
    before = {"plain": plain, "tiny": tiny, "zero": zero, "out": zero, "turned": plain, "into": zero + 1, "nan": plain}
    after = {"plain": plain + draw.normal(size=64), "tiny": tiny + 1e-91, "zero": zero, "out": zero + 1}
    after |= {"turned": -plain, "into": zero, "nan": plain, "new": plain}
    nan = [int(name == "nan") for name in after]
    rows = with_updates(merged_statistics(after, nan=nan), merged_statistics(before), since=5).to_pylist()
    for row in rows:
        name = row["name"]
        if name in ("nan", "new"):
            assert (row["update_norm"], row["cosine"]) == (None, None)
            continue
        old, new = before[name], after[name]
        sums = np.square(new - old).sum(), np.square(old).sum(), np.square(new).sum()
        assert row["norm_before"] == float(metrics.norm(sums[1]))
        assert row["update_norm"] == float(metrics.norm(sums[0]))
        cosine = metrics.known(metrics.cosine(old @ new, *sums[1:]))
        assert row["cosine"] == (None if cosine is None else pytest.approx(cosine, rel=1e-14)), name
    cosines = {row["name"]: row["cosine"] for row in rows}
    assert [name for name, cosine in cosines.items() if cosine is None] == ["zero", "out", "into", "nan", "new"]
    assert cosines["tiny"] == pytest.approx(1.0, abs=0.1)


def test_the_parts_that_matrices_are_made_of(root, rows):
    """Each metric from the parts that SQL selects equals the view's value, or that of the parts themselves."""
    history = History.open(root)
    refs = [CheckpointRef("run-a", step) for step in STEPS]
    with StatisticsMatrix.chosen(history, refs, kinds="*", names="*") as matrix:
        names = ["squares", "sum", "finite", "zeros", "numel", "update_squares", "before_squares", "dot"]
        _, parts = matrix.statistics([*names, "zeros_share"])
    parts = {name: values.T.ravel() for name, values in parts.items()}
    somewhere_finite = (rows["finite"] > 0) | (rows["numel"] == 0)
    np.testing.assert_array_equal(metrics.norm(parts["squares"])[somewhere_finite], rows["norm"][somewhere_finite])
    assert np.isnan(parts["squares"][~somewhere_finite]).all()
    np.testing.assert_array_equal(metrics.mean(parts["sum"], parts["finite"]), rows["mean"])
    shares = metrics.zeros_share(parts["zeros"], parts["numel"])
    more = parts["numel"] > 1
    np.testing.assert_array_equal(parts["zeros_share"][more], shares[more])
    relative = metrics.relative_update(parts["update_squares"], parts["before_squares"])
    np.testing.assert_array_equal(relative, rows["relative_update"])
    cosine = metrics.cosine(parts["dot"], parts["before_squares"], parts["squares"])
    np.testing.assert_allclose(cosine, rows["cosine"], rtol=1e-14)


def test_estimates_of_a_diff_equal_those_of_the_catalog(root):
    """Estimates come from the sketches of two checkpoints and from the columns of the view, and both agree."""
    history = History.open(root)
    for before, after in pairwise(STEPS):
        found = estimated(history, CheckpointRef("run-a", before), CheckpointRef("run-a", after))
        assert ("model", "plain") in found
        sql = "SELECT * FROM statistics WHERE step = $step"
        of_name = {row["name"]: row for row in history.query(sql, {"step": after}).to_pylist()}
        for (_, name), figures in found.items():
            for figure in ("relative_update", "update_norm", "cosine", "norm_before"):
                expected = of_name[name][figure]
                assert figures[figure] == (expected if expected is None else pytest.approx(expected, rel=1e-5)), name


def test_a_group_of_one_row_has_the_values_of_the_row(root):
    """Grouped values follow from norms by `dot_of_squares`; the row's own cosine comes from the elements."""
    for row in Explorer.open(root).diff(0, 10, quiet=True):
        if row["status"] != "changed" or row["update_norm"] is None or math.isinf(row["update_norm"]):
            continue
        (group,) = grouped([row], "layer")
        if row["norm_before"] > 1e-150:
            for figure in (
                "relative_update",
                "update_norm",
                "norm_before",
                "changed_share",
                "max_change",
                "sign_flips",
            ):
                assert group[figure] == pytest.approx(row[figure], rel=1e-15), (row["name"], figure)
            assert group["cosine"] == (row["cosine"] and pytest.approx(row["cosine"], abs=1e-12)), row["name"]


@pytest.mark.parametrize(
    ("figure", "sums", "expected"),
    [
        (metrics.norm, (0.0,), 0.0),
        (metrics.norm, (math.nan,), None),
        (metrics.norm, (math.inf,), math.inf),
        (metrics.mean, (0.0, 0.0), None),
        (metrics.rms, (8.0, 2.0), 2.0),
        (metrics.std, (8.0, 4.0, 2.0), 0.0),
        (metrics.zeros_share, (0.0, 0.0), None),
        (metrics.minimum, (math.inf,), None),
        (metrics.maximum, (-math.inf,), None),
        (metrics.maximum, (math.inf,), math.inf),
        (metrics.relative_update, (0.0, 0.0), 0.0),
        (metrics.relative_update, (4.0, 0.0), math.inf),
        (metrics.relative_update, (4.0, 16.0), 0.5),
        (metrics.relative_update, (math.nan, 1.0), None),
        (metrics.movement, (0.0, 0.0, 4.0, 0.0), 0.0),
        (metrics.movement, (4.0, 0.0, 4.0, 1.0), 1.0),
        (metrics.movement, (4.0, 16.0, 4.0, 1.0), 0.5),
        (metrics.movement, (4.0, 0.0, 4.0, 0.0), math.inf),
        (metrics.movement, (math.nan, 1.0, 1.0, 1.0), None),
        (metrics.usual_movement, (0.0, 3.0), 1.0),
        (metrics.cosine, (0.0, 0.0, 4.0), None),
        (metrics.cosine, (5.0, 4.0, 4.0), 1.0),
        (metrics.cosine, (-1e-200, 1e-200, 1e-200), -1.0),
        (metrics.cosine, (math.nan, 1.0, 1.0), None),
        (metrics.changed_share, (0.0, 0.0), 0.0),
        (metrics.changed_share, (1.0, 4.0), 0.25),
        (metrics.changed_share, (math.nan, 4.0), None),
    ],
)
def test_edges(figure, sums, expected):
    with np.errstate(all="raise"):
        assert metrics.known(figure(*sums)) == expected
        whole_array = figure(*(np.array([value, value]) for value in sums))
    assert [metrics.known(value) for value in whole_array] == [expected] * 2


def test_the_size_of_an_ordinary_element_is_the_median_of_all_elements():
    sizes = np.array([[0.0, 1.0], [5.0, 2.0], [0.1, math.nan], [math.inf, 3.0]])
    numel = np.array([[99.0, 1.0], [10.0, 1.0], [1.0, 50.0], [9.0, 1.0]])
    assert metrics.typical_size(sizes, numel).tolist() == [5.0, 2.0]
    assert metrics.typical_size(np.array([0.0, math.nan]), np.ones(2)) == 0.0
    assert metrics.typical_size(np.zeros((0, 3)), np.zeros((0, 3))).tolist() == [0.0] * 3
    assert metrics.typical_movement(np.array([0.0, 4.0, 1.0, 2.0])) == 2.0


def test_a_movement_is_measured_against_its_peers():
    moved = np.array([1.0, 1.0, 3.0, 0.0, math.nan, 6.0])
    found = metrics.times_usual(moved, ["a", "a", "a", "a", "a", "alone"])
    np.testing.assert_array_equal(found, [1.0, 1.0, 3.0, 0.0, math.nan, 6.0])
    np.testing.assert_array_equal(metrics.times_usual(np.zeros(2), ["a", "b"]), [0.0, 0.0])
    assert len(metrics.times_usual(np.zeros(0), [])) == 0
