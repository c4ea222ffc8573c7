"""The tables behind the heat map and the histogram equal the tensors, and have no value where nothing is known."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from explorer_helpers import Run, whole
from widget_helpers import JUMP, SILENT, STEPS, layered_history

from capture.load.read_into import read_extents
from catalog.errors import NotFoundError
from dshistory.comparison.sketch_estimates import norm_bound
from dshistory.display.progress import listening
from dshistory.explorer import Explorer
from dshistory.tensors import stream


@pytest.fixture(scope="module")
def h(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    return layered_history(tmp_path_factory.mktemp("layers") / "history")


def values(table) -> dict[tuple[str, int], float | None]:
    return {(row["layer"], row["step"]): row["value"] for row in table}


def test_norms_equal_those_of_the_tensors_as_one_vector(h: Explorer) -> None:
    found = values(h.layers(metric="norm"))
    for step in set(STEPS) - {SILENT}:
        tensors = [h.tensor(name, step) for name in ("h.1.attn.weight", "h.1.mlp.weight")]
        exact = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
        assert found["h.1", step] == pytest.approx(exact, rel=1e-12)


def test_updates_are_within_their_bound_of_the_exact_ones(h: Explorer) -> None:
    for metric in ("relative_update", "update_norm"):
        table = h.layers(metric=metric)
        for before, after in ((30, JUMP), (JUMP, 50)):
            exact = {row["name"]: row[metric] for row in h.diff(before, after, by="layer", exact=True)}
            for row in (row for row in table if row["step"] == after):
                assert row["value"] == pytest.approx(exact[row["layer"]], rel=row["bound"])
                assert 0 < row["bound"] == norm_bound(256)


def test_metrics_read_from_the_tensors_agree_with_the_diff_by_layer(h: Explorer) -> None:
    for metric in ("max_change", "changed_share", "sign_flips"):
        found = values(h.layers(metric=metric, first=10))
        for row in h.diff(30, JUMP, by="layer", exact=True):
            assert found[row["name"], JUMP] == pytest.approx(row[metric])


def test_small_tensors_of_a_checkpoint_are_read_once_and_in_one_call(h: Explorer, monkeypatch) -> None:
    read: list[int] = []

    def counted(root: Path, extents: list) -> list[torch.Tensor]:
        read.append(len(extents))
        return read_extents(root, extents)

    monkeypatch.setattr(stream, "read_extents", counted)
    found = h.layers(metric="max_change")
    assert len(read) == len(STEPS)
    assert max(read) > 1
    monkeypatch.setattr(stream, "_SMALL_BYTES", 0)
    assert h.layers(metric="max_change").to_pandas().equals(found.to_pandas())
    assert len(read) > 2 * len(STEPS)


def test_a_share_of_a_layer_counts_its_elements(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoint(1, whole({"h.0.w": torch.zeros(90), "h.0.b": torch.zeros(10)}))
    run.checkpoint(2, whole({"h.0.w": torch.zeros(90), "h.0.b": torch.ones(10)}))
    run.close()
    row = Explorer.open(tmp_path).layers(metric="changed_share")[1]
    assert (row["value"], row["most"]) == (pytest.approx(0.1), "h.0.b")


def test_a_value_without_statistics_is_missing_and_never_zero(h: Explorer) -> None:
    norms = h.layers(metric="norm")
    assert {row["step"] for row in norms if row["value"] is None} == {SILENT}
    assert "no statistics of 1 checkpoint: `analyze` computes them" in norms.note
    moves = values(h.layers())
    gaps = {step for (_, step), value in moves.items() if value is None}
    assert gaps == {STEPS[0], SILENT, SILENT + 10}, "an update needs the checkpoint before it"


def test_values_that_are_not_finite_are_not_reported_as_missing_statistics(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step, value in ((1, 1.0), (2, 2.0), (3, float("nan")), (4, float("nan"))):
        run.checkpoint(step, whole({"h.0.w": torch.full((64,), value)}))
    run.close()
    explorer = Explorer.open(tmp_path)
    explorer.analyze(quiet=True)
    norms = explorer.layers(metric="norm")
    assert norms["value"].to_pylist() == [8.0, 16.0, None, None]
    assert norms.note.endswith("over 4 checkpoints; not finite at 2 checkpoints")
    assert (
        "unknown at 3 checkpoints: the first, those that are not finite, and those without statistics"
        in explorer.layers().note
    )


def test_the_tensor_that_stands_out_is_named(h: Explorer) -> None:
    (row,) = [row for row in h.layers("h.1.*") if row["step"] == JUMP]
    assert (row["most"], row["tensors"]) == ("h.1.mlp.weight", 2)


def test_the_lowest_cosine_stands_out(h: Explorer) -> None:
    for metric in ("cosine", "norm", "max_change"):
        (row,) = [row for row in h.layers("h.1.*", metric=metric) if row["step"] == JUMP]
        assert row["most"] == "h.1.mlp.weight", metric


def test_tensors_without_a_sketch_are_left_out_and_not_guessed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (1, 2):
        run.checkpoint(step, whole({"h.0.w": torch.full((64,), float(step)), "h.0.b": torch.full((3,), float(-step))}))
    run.close()
    h = Explorer.open(tmp_path)
    h.analyze(quiet=True)
    row = h.layers()[1]
    assert (row["value"], row["tensors"], row["most"]) == (pytest.approx(1.0), 1, "h.0.w")
    assert h.layers(metric="norm")["tensors"].to_pylist() == [2, 2]


def test_a_first_step_knows_the_one_before_it(h: Explorer) -> None:
    whole_table, part = values(h.layers()), values(h.layers(first=JUMP, last=JUMP))
    assert {step for _, step in part} == {JUMP}
    assert all(value == whole_table[place] for place, value in part.items())


def test_an_unchanged_layer_has_a_zero_update(tmp_path: Path) -> None:
    run = Run(tmp_path)
    weights = {"h.0.w": torch.randn(64), "h.1.w": torch.zeros(64)}
    for step in (1, 2):
        run.checkpoint(step, whole(weights))
    run.close()
    h = Explorer.open(tmp_path)
    h.analyze(quiet=True)
    assert values(h.layers()) == {("h.0", 1): None, ("h.1", 1): None, ("h.0", 2): 0.0, ("h.1", 2): 0.0}
    assert {row["bound"] for row in h.layers() if row["step"] == 2} == {0.0}


def test_an_update_out_of_zero_is_infinite_and_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoint(1, whole({"h.0.w": torch.zeros(64)}))
    run.checkpoint(2, whole({"h.0.w": torch.ones(64)}))
    run.close()
    h = Explorer.open(tmp_path)
    h.analyze(quiet=True)
    row = h.layers()[1]
    assert (row["value"], row["most"]) == (math.inf, "h.0.w")


def test_values_that_are_not_finite_are_counted_and_make_updates_unknown(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoint(1, whole({"h.0.w": torch.ones(64)}))
    run.checkpoint(2, whole({"h.0.w": torch.tensor([math.nan, math.inf, *[1.0] * 62])}))
    run.close()
    h = Explorer.open(tmp_path)
    h.analyze(quiet=True)
    assert h.layers(metric="nonfinite")["value"].to_pylist() == [0.0, 2.0]
    assert h.layers()["value"].to_pylist() == [None, None]


def test_the_first_step_after_a_fork_is_compared_with_the_parent(tmp_path: Path) -> None:
    parent = Run(tmp_path, "run-a")
    child = Run(tmp_path, "run-b", parent=("run-a", 1), created="2026-11-21T10:15:09+00:00")
    parent.checkpoint(1, whole({"h.0.w": torch.ones(64)}))
    child.checkpoint(2, whole({"h.0.w": torch.full((64,), 1.5)}))
    parent.close()
    child.close()
    h = Explorer.open(tmp_path)
    h.analyze(quiet=True)
    assert h.layers()["value"].to_pylist() == [None, pytest.approx(0.5)]


def test_every_layer_that_is_shown_can_be_asked_for(h: Explorer) -> None:
    for layer in set(h.layers()["layer"].to_pylist()):
        assert set(h.layers(layer)["layer"].to_pylist()) == {layer}


def test_layers_are_in_reading_order(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoint(1, whole({f"h.{i}.w": torch.ones(4) for i in (10, 2, 1)}))
    run.close()
    h = Explorer.open(tmp_path)
    h.analyze(quiet=True)
    assert h.layers(metric="norm").labels() == ["h.1", "h.2", "h.10"]


def test_long_work_reports_its_progress(h: Explorer) -> None:
    shares: list[float] = []
    with listening(shares.append):
        h.layers(metric="sign_flips")
    assert shares
    assert shares[-1] == 1.0


def test_the_picture_has_the_values_of_the_table(h: Explorer) -> None:
    table = h.layers(kinds="*", metric="norm")
    (heat,) = table.plot().data
    assert [list(line) for line in heat.z] == table.grid()[2]
    assert list(heat.y) == table.labels()
    assert "h.0 (exp_avg)" in heat.y


def test_bad_input_names_what_there_is(h: Explorer, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no metric 'nrom'; the metrics are norm"):
        h.layers(metric="nrom")
    with pytest.raises(NotFoundError, match=r"nearest.*h\.0\.mlp"):
        h.layers("h.0.mpl.weight")
    with pytest.raises(NotFoundError, match="no checkpoint from step 60 to None; it has those from 0 to 50"):
        h.layers(first=60)
    run = Run(tmp_path)
    with pytest.raises(NotFoundError, match="has no committed checkpoint yet"):
        Explorer.open(tmp_path).layers()
    run.checkpoint(1, whole({"w": torch.ones(4)}))
    run.close()
    for metric in ("norm", "relative_update"):
        with pytest.raises(NotFoundError, match="statistics yet: `analyze` computes them"):
            Explorer.open(tmp_path).layers(metric=metric)


def test_a_histogram_counts_as_numpy_does(h: Explorer) -> None:
    tensor = h.tensor("head.weight", JUMP).double().numpy()
    exponents, counts = np.unique(np.floor(np.log2(np.abs(tensor))), return_counts=True)
    rows = {row["exponent"]: row for row in h.histogram("head.weight") if row["step"] == JUMP and row["elements"]}
    assert {e: row["elements"] for e, row in rows.items()} == dict(zip(exponents, counts, strict=True))
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)


def test_a_histogram_with_signs_counts_as_numpy_does(h: Explorer) -> None:
    tensor = h.tensor("head.weight", JUMP).double().numpy()
    table = h.histogram("head.weight", signs=True, quiet=True)
    for sign in (-1, 1):
        of_sign = np.abs(tensor[np.sign(tensor) == sign])
        exponents, counts = np.unique(np.floor(np.log2(of_sign)), return_counts=True)
        rows = {row["exponent"]: row for row in table if (row["step"], row["sign"]) == (JUMP, sign)}
        assert {e: row["elements"] for e, row in rows.items()} == dict(zip(exponents, counts, strict=True))
        assert {e: row["share"] for e, row in rows.items()} == pytest.approx(
            dict(zip(exponents, counts / tensor.size, strict=True))
        )
    _, lines, _ = table.picture()
    below = [int(line[7:-6]) for line in lines if line.startswith("-2<sup>")]
    assert lines[: len(below)] == [f"-2<sup>{exponent}</sup>" for exponent in sorted(below, reverse=True)]
    assert table.plot().layout.yaxis.title.text == "head.weight (model)"
    with pytest.raises(NotFoundError, match=r"no tensor fits 'head\.wieght'"):
        h.histogram("head.wieght", signs=True, quiet=True)


def test_a_histogram_is_empty_where_there_are_no_statistics(h: Explorer) -> None:
    table = h.histogram("head.weight", state="exp_avg")
    steps, lines, shares = table.picture()
    assert tuple(steps) == STEPS
    assert {line[steps.index(SILENT)] for line in shares} == {None}
    assert "1 has no statistics" in table.note
    (heat,) = table.plot().data
    assert list(heat.y) == lines
    assert list(heat.z[0]) == shares[0]


def test_a_histogram_of_nothing(h: Explorer, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no statistics of model 'head\.wieght'.*nearest.*head\.weight"):
        h.histogram("head.wieght")
    run = Run(tmp_path)
    run.checkpoint(1, whole({"w": torch.zeros(4)}))
    run.close()
    zeros = Explorer.open(tmp_path)
    zeros.analyze(quiet=True)
    assert [(row["exponent"], row["elements"], row["share"]) for row in zeros.histogram("w")] == [(None, 4, 1.0)]
    assert list(zeros.histogram("w").plot().data[0].y) == ["0"]
    (row,) = zeros.histogram("w", signs=True, quiet=True)
    assert (row["sign"], row["exponent"], row["elements"], row["share"]) == (0, None, 4, 1.0)
    assert zeros.histogram("w").plot().layout.yaxis.title.text == "|element| of w (model)"


def test_a_value_against_its_past_is_over_the_median_of_eight_before(tmp_path: Path) -> None:
    run = Run(tmp_path)
    norms = [4.0, 2.0, 3.0, 3.0, 3.0, 30.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 6.0]
    for step, norm in enumerate(norms):
        run.checkpoint(step, whole({"h.10.w": torch.full((4,), norm / 2), "h.2.w": torch.zeros(4)}))
    run.close()
    h = Explorer.open(tmp_path)
    h.analyze(quiet=True)
    table = h.layers(metric="norm").against_past()
    _, lines, values = table.grid()
    assert lines == [("model", "h.2"), ("model", "h.10")], "in natural order"
    assert values[0] == [None] * len(norms), "nothing is usual about zeros"
    expected = [None] * 3 + [norms[i] / np.median(norms[max(0, i - 8) : i]) for i in range(3, len(norms))]
    assert values[1] == pytest.approx(expected)
    picture = table.picture()
    assert picture.scale.low == -picture.scale.high
    assert "over the median" in table.note
    assert table.plot().data[0].z[1][5] == pytest.approx(1.0), "ten times more than usual, as a power of ten"


def test_the_plot_draws_a_cosine_by_its_distance_from_one(h: Explorer) -> None:
    table = h.layers(metric="cosine")
    (heat,) = table.plot().data
    values = table.grid()[2]
    shown = [[None if value is None else 1 - value for value in line] for line in values]
    assert [list(line) for line in heat.customdata] == shown
    assert "1 − cosine" in heat.hovertemplate
    assert h.layers(metric="norm").plot().data[0].hovertext[0][-1] == f"step {STEPS[-1]}"
    assert heat.hovertext[0][1] == f"steps {STEPS[0]} → {STEPS[1]}"
