"""A drill-down into one tensor ranks its changed rows, columns and heads, with torch's numbers."""

import math

import numpy as np
import pytest
import torch
from explorer_helpers import history_of, whole

from catalog.errors import MismatchError, NotFoundError, SetupError
from dshistory.comparison import drilldown

SHAPE = (12, 10, 4)


@pytest.fixture(params=[1 << 20, 7], ids=["one chunk", "chunks of seven"])
def explorer(request, tmp_path, monkeypatch):
    monkeypatch.setattr(drilldown, "_CHUNK_NUMEL", request.param)
    torch.manual_seed(1)
    before = torch.randn(SHAPE)
    after = before + 0.01 * torch.randn(SHAPE)
    after[7] += 3.0
    after[:, 2] = before[:, 2]
    found = history_of(tmp_path, [whole({"w": before, "b": torch.ones(3)})], [whole({"w": after, "b": torch.ones(4)})])
    return found, before.double(), after.double()


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_along_an_axis(explorer, axis):
    found, before, after = explorer
    table = found.diff(10, 20, tensor="w", axis=axis, quiet=True)
    rows = {row["index"]: row for row in table}
    assert sorted(rows) == list(range(SHAPE[axis]))
    for index, row in rows.items():
        a, b = before.select(axis, index).flatten(), after.select(axis, index).flatten()
        assert row["update_norm"] == pytest.approx(float((b - a).norm()), rel=1e-12)
        assert row["relative_update"] == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-12)
        assert row["cosine"] == pytest.approx(float(a @ b / (a.norm() * b.norm())), rel=1e-12)
        assert row["max_change"] == float((b - a).abs().max())
        assert row["changed_share"] == pytest.approx(float((a != b).double().mean()))
        assert row["sign_flips"] == int((a * b < 0).sum())
    order = [row["times_usual"] for row in table]
    assert order == sorted(order, reverse=True)


def test_the_row_that_changed_is_first(explorer):
    first = next(iter(explorer[0].diff(10, 20, tensor="w", quiet=True)))
    assert (first["index"], first["name"], first["kind"]) == (7, "w[7]", "model")


def test_heads(explorer):
    found, before, after = explorer
    table = found.diff(10, 20, tensor="w", axis=0, parts=3, quiet=True)
    first = next(iter(table))
    assert (first["index"], first["name"]) == (1, "w[4:8]")
    assert first["update_norm"] == pytest.approx(float((after[4:8] - before[4:8]).norm()), rel=1e-12)
    assert next(iter(found.diff(10, 20, tensor="w", axis=1, parts=5, quiet=True)))["name"].startswith("w[:, ")


def test_arguments_that_do_not_fit_are_refused(explorer):
    found, *_ = explorer
    with pytest.raises(SetupError, match=r"shape \(12, 10, 4\): there is no axis 3"):
        found.diff(10, 20, tensor="w", axis=3)
    with pytest.raises(SetupError, match="12 indices along axis 0: they can't be cut into 5"):
        found.diff(10, 20, tensor="w", parts=5)
    with pytest.raises(MismatchError, match=r"'b' has shape \(3,\) in .*\(4,\) in"):
        found.diff(10, 20, tensor="b")
    with pytest.raises(NotFoundError, match="'v'"):
        found.diff(10, 20, tensor="v")


def test_values_that_are_not_finite_are_left_out_but_count_as_changed(tmp_path):
    before, after = torch.ones(4, 3), torch.ones(4, 3)
    after[2, 1] = math.nan
    found = history_of(tmp_path, [whole({"w": before})], [whole({"w": after})])
    rows = {row["index"]: row for row in found.diff(10, 20, tensor="w", quiet=True)}
    assert rows[2]["changed_share"] == pytest.approx(1 / 3)
    assert [rows[i]["update_norm"] for i in range(4)] == [0.0] * 4
    assert rows[2]["norm_after"] == pytest.approx(np.sqrt(2))
