"""The figures show the right values, stay light, and escape the names in them."""

import json
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from explorer_helpers import Run, tiny_history, whole

from catalog.errors import SetupError
from dshistory import Explorer


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explorer]:
    for run in tiny_history(tmp_path_factory.mktemp("plot") / "history"):
        yield Explorer.open(run.root)


def test_the_loss_of_every_step_with_checkpoints_marked(explorer: Explorer) -> None:
    line, marks = explorer.log().plot().data
    assert list(line.x) == [0, 1, 10, 11, 20, 21]
    assert list(line.y) == pytest.approx([3.0, 2.9, 2.0, 1.9, 1.0, 0.9])
    assert list(marks.x) == [0, 10, 20]
    assert list(marks.y) == [3.0, 2.0, 1.0]


def test_the_most_changed_tensors_are_on_top(explorer: Explorer) -> None:
    diff = explorer.diff(0, 20, kinds="*")
    figure = diff.plot(top=3)
    assert list(figure.layout.yaxis.categoryarray) == [f"{row['name']} ({row['kind']})" for row in diff.top(3)]
    assert figure.layout.yaxis.autorange == "reversed"
    shown = dict(pair for bar in figure.data for pair in zip(bar.y, bar.x, strict=True))
    assert [shown[label] for label in figure.layout.yaxis.categoryarray] == diff.top(3)["times_usual"].to_pylist()


def test_a_tensor_that_came_out_of_zero_has_no_bar_and_is_counted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (1, 2):
        run.checkpoint(step, whole({"w": torch.full((2,), float(step)), "bias": torch.full((2,), step - 1.0)}))
    run.close()
    figure = Explorer.open(tmp_path).diff(1, 2, metrics="relative_update").plot()
    assert [list(bar.y) for bar in figure.data] == [["w"]]
    assert "1 with a norm of zero before" in figure.layout.xaxis.title.text


def test_the_path_of_a_run_has_one_scale_and_the_places_of_the_table(explorer: Explorer) -> None:
    explorer.analyze(quiet=True)
    points = explorer.distances().path()
    figure = points.plot()
    (line,) = figure.data
    assert list(line.x) == points["x"].to_pylist()
    assert list(line.y) == points["y"].to_pylist()
    assert list(line.marker.color) == [0, 10, 20]
    assert figure.layout.yaxis.scaleanchor == "x"


def test_anomalies_are_marks_at_their_step_and_tensor(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in range(4):
        weights = {"a": torch.full((64,), float("nan") if step >= 2 else 1.0), "<b>": torch.ones(64)}
        if step == 3:
            weights["<b>"][:40] = 0
        run.checkpoint(step, whole(weights))
    run.close()
    explorer = Explorer.open(tmp_path)
    explorer.analyze(quiet=True)
    nan, zero = explorer.anomalies().plot().data
    assert [(nan.name, list(nan.x), list(nan.y)), (zero.name, list(zero.x), list(zero.y))] == [
        ("not finite", [2], ["a"]),
        ("goes to zero", [3], ["&lt;b&gt;"]),
    ]
    assert zero.customdata[0][0] == 40 / 64
    assert [list(marks.x) for marks in explorer.anomalies().plot(top=1).data] == [[2], []]


def test_a_history_without_anomalies_says_so_in_its_figure(explorer: Explorer) -> None:
    figure = explorer.anomalies().plot()
    assert [note.text for note in figure.layout.annotations] == ["no anomaly was found"]


def test_figures_are_light(explorer: Explorer) -> None:
    assert len(json.dumps(explorer.log().plot().to_plotly_json(), default=list)) < 20_000


def test_names_are_escaped(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (1, 2):
        run.checkpoint(step, whole({"<b>w</b>": torch.full((2,), float(step))}))
    run.close()
    (bar,) = Explorer.open(tmp_path).diff(1, 2).plot().data
    assert list(bar.y) == ["&lt;b&gt;w&lt;/b&gt;"]


def test_without_plotly_the_extra_is_named(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(SetupError, match=r"\[notebook\]"):
        explorer.log().plot()


def test_where_there_is_no_browser_a_figure_says_how_to_save_it(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = explorer.log().plot()
    monkeypatch.setattr(webbrowser, "_tryorder", [])
    with pytest.raises(SetupError, match=r"no browser here .*\.write_html\('figure.html'\)"):
        figure.show(renderer="browser")
