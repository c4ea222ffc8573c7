"""In this process every gesture on the widget draws its table, and its line of Python gives the same table."""

import gc
import math
import threading
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import ipywidgets
import plotly.graph_objects as go
import pytest
import torch
from explorer_helpers import Run, extended_shell, whole
from IPython.core.error import UsageError
from widget_helpers import JUMP, SILENT, STEPS, cells, click, layered_history, piece, titles, trace

from catalog.errors import NotFoundError
from dshistory.display.progress import ByteProgress
from dshistory.explorer import Explorer
from dshistory.widgets import Exploration


@pytest.fixture(scope="module")
def h(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    return layered_history(tmp_path_factory.mktemp("widgets") / "history")


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dshistory")]


GESTURES = {
    "metric": lambda e: setattr(e, "metric", "norm"),
    "a metric that is read": lambda e: setattr(e, "metric", "changed_share"),
    "kind": lambda e: setattr(e, "kind", "exp_avg"),
    "filter": lambda e: setattr(e, "filter", "h.1.*"),
    "two filters": lambda e: setattr(e, "filter", "*.attn.*, head*"),
    "range": lambda e: setattr(e, "range", (10, 40)),
    "timeline": lambda e: setattr(e, "timeline", "lr"),
    "a layer": lambda e: e.select("h.1", JUMP),
    "a tensor": lambda e: e.select("head.weight", JUMP),
    "diff": lambda e: e.pick(30, JUMP),
    "colour": lambda e: setattr(e, "colour", "against its own past"),
    "sorted diff": lambda e: (e.pick(30, JUMP), e.sort("cosine")),
    "twice sorted diff": lambda e: (e.pick(30, JUMP), e.sort("name"), e.wait(60), e.sort("name")),
}


@pytest.mark.parametrize("name", GESTURES)
def test_the_line_of_a_gesture_gives_the_table_that_is_shown(e: Exploration, h: Explorer, name: str) -> None:
    before = e.code
    GESTURES[name](e)
    e.wait(60)
    assert e.code != before
    assert e.code == piece(e, "code").value
    assert eval(e.code, {"h": h}).to_arrow() == e.table.to_arrow()


def test_the_page_draws_no_panel_twice_and_none_that_stays(e: Exploration) -> None:
    """A page takes up to half a second for each message, whatever is in it, and composes the text of every cell."""
    e.select("h.1", JUMP)
    e.wait(60)
    sent: list[str] = []
    e.figure.observe(
        lambda change: sent.append(change["name"]) if change["new"] else None,
        names=["_py2js_update", "_py2js_restyle", "_py2js_relayout"],
    )
    e.metric = "norm"
    e.wait(60)
    assert sent == 4 * ["_py2js_update"], "heat map and trajectory are announced and drawn, the magnitudes stay"
    assert trace(e, "heat").texttemplate is None


def test_the_first_picture(e: Exploration, h: Explorer) -> None:
    assert e.code == "h.layers(metric='relative_update')"
    assert cells(e) == {(row["layer"], row["step"]): row["value"] for row in h.layers()}
    losses = h.log().losses
    assert list(trace(e, "metric").x) == losses["step"].to_pylist()
    assert list(trace(e, "metric").y) == losses["value"].to_pylist()
    assert list(trace(e, "checkpoints").x) == list(STEPS)
    assert "estimated from the sketches" in e.status


def test_an_anomaly_is_marked_where_it_is_first_seen(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in range(1, 4):
        run.checkpoint(step, whole({"<i>w": torch.full((4,), float("nan") if step == 2 else 1.0)}))
    run.close()
    h = Explorer.open(tmp_path)
    h.analyze(quiet=True)
    e = h.explore()
    e.wait(60)
    assert list(trace(e, "anomalies").x) == [2]
    assert trace(e, "anomalies").text[0] == "step 2<br>not finite: &lt;i&gt;w (model)"
    click(e, None, 1, of="metric")
    e.wait(60)
    assert e.code.startswith("h.layers"), "no anomaly is there"
    for of in ("anomalies", "metric"):
        e.metric = "norm" if of == "anomalies" else "rms"
        click(e, None, 2, of=of)
        e.wait(60)
        assert e.code == "h.diff(1, 2)", "a click opens its diff, also where the line lies over the mark"
    assert "&lt;i&gt;w" in piece(e, "diff").value
    e.close()


def test_anomalies_are_marked_on_the_metric_that_is_shown(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in range(1, 4):
        weights = {"w": torch.full((4,), float("nan") if step == 2 else 1.0)}
        run.checkpoint(step, whole(weights), loss=step / 4, lr=step / 8)
    run.close()
    h = Explorer.open(tmp_path)
    h.analyze(quiet=True)
    e = h.explore()
    e.wait(60)
    assert list(trace(e, "anomalies").y) == [0.5]
    e.timeline = "lr"
    e.wait(60)
    assert list(trace(e, "anomalies").y) == [0.25]
    assert set(trace(e, "checkpoints").y) == {0.0}, "at the bottom, not on the line"
    assert trace(e, "checkpoints").yaxis == "y5"
    assert titles(e)["timeline"].startswith("lr of every step")
    e.close()


def test_a_click_opens_the_tensor_that_changed(e: Exploration, h: Explorer) -> None:
    click(e, "h.1", JUMP)
    e.wait(60)
    assert e.code == "h.trajectory('h.1.mlp.weight', metric='relative_update')"
    rows = h.trajectory("h.1.mlp.weight")
    assert list(trace(e, "detail").y) == rows["value"].to_pylist()
    steps, lines, shares = h.histogram("h.1.mlp.weight").picture()
    histogram = trace(e, "histogram")
    assert (list(histogram.x), list(histogram.y)) == (steps, lines)
    assert [list(line) for line in histogram.z] == shares
    assert e.figure.layout.shapes[0].x0 == JUMP


def test_the_opened_tensor_follows_the_metric(e: Exploration, h: Explorer) -> None:
    e.select("h.1", JUMP)
    e.metric = "norm"
    e.wait(60)
    assert e.code == "h.layers(metric='norm')"
    assert list(trace(e, "detail").y) == h.trajectory("h.1.mlp.weight", metric="norm")["value"].to_pylist()


def test_the_last_gesture_counts_whatever_the_others_take(e: Exploration, h: Explorer) -> None:
    e.pick(0, 10)
    e.metric = "max_change"
    e.select("h.0", 10)
    e.kind = "exp_avg"
    e.metric = "norm"
    e.wait(60)
    assert e.code == "h.layers(metric='norm', kinds='exp_avg')"
    assert cells(e) == {(row["layer"], row["step"]): row["value"] for row in e.table}
    assert titles(e)["heat"] == "norm, exp_avg"
    assert titles(e)["detail"].startswith("norm of h.0.mlp.")
    assert titles(e)["detail"].endswith("(exp_avg)")
    assert "h.diff(0, 10, kinds=&#x27;exp_avg&#x27;)" in piece(e, "diff").value


def test_a_part_says_what_it_waits_for_while_a_gesture_is_computed(e: Exploration) -> None:
    seen = []
    heat = trace(e, "heat")
    real = e._view.explorer

    class Slow:
        root, history = real.root, real.history

        def layers(self, *arguments: Any, **options: Any) -> Any:
            seen.append((titles(e)["heat"], heat.opacity))
            return real.layers(*arguments, **options)

    e._view.explorer = Slow()
    e.metric = "norm"
    e.wait(60)
    assert seen == [("norm, model …", 0.3)]
    assert (titles(e)["heat"], heat.opacity) == ("norm, model", 1.0)


def test_the_opened_tensor_follows_the_kind(e: Exploration, h: Explorer) -> None:
    e.select("h.1", JUMP)
    e.wait(60)
    e.kind = "exp_avg"
    e.wait(60)
    assert titles(e)["detail"] == "relative_update of h.1.mlp.weight (exp_avg)"
    rows = h.trajectory("h.1.mlp.weight", kinds="exp_avg")
    assert list(trace(e, "detail").y) == rows["value"].to_pylist()
    assert list(trace(e, "histogram").y) == h.histogram("h.1.mlp.weight", state="exp_avg").picture()[1]
    assert "exp_avg" in titles(e)["histogram"]


def test_the_panels_of_a_tensor_appear_with_it(e: Exploration) -> None:
    layout = e.figure.layout
    alone = layout.height
    assert layout.yaxis2.domain[0] < 0.15, "before, nothing is blank"
    assert not layout.yaxis3.visible
    e.select("h.1", JUMP)
    e.wait(60)
    assert layout.yaxis3.visible
    assert layout.yaxis4.visible
    assert alone < layout.height < 700
    places = {note.name: note.y for note in layout.annotations}
    assert places == {
        name: pytest.approx(layout[axis].domain[1])
        for name, axis in {"timeline": "yaxis", "heat": "yaxis2", "detail": "yaxis3", "histogram": "yaxis4"}.items()
    }


def test_the_detail_has_a_logarithmic_axis_where_the_heat_map_has_one(e: Exploration) -> None:
    e.select("h.1", JUMP)
    e.wait(60)
    assert e.figure.layout.yaxis3.type == "log"
    assert trace(e, "heat").colorbar.ticktext
    e.metric = "norm"
    e.wait(60)
    assert e.figure.layout.yaxis3.type == "linear"


def test_a_cosine_is_drawn_by_its_distance_from_one(e: Exploration, h: Explorer) -> None:
    e.select("h.1", JUMP)
    e.metric = "cosine"
    e.wait(60)
    assert titles(e)["heat"] == "1 − cosine, model"
    assert titles(e)["detail"].startswith("1 − cosine of ")
    shown = [
        None if value is None else 1 - value
        for value in h.trajectory("h.1.mlp.weight", metric="cosine")["value"].to_pylist()
    ]
    assert list(trace(e, "detail").y) == shown


def test_a_cell_says_from_which_step_to_which(e: Exploration) -> None:
    heat = trace(e, "heat")
    assert list(heat.hovertext[0]) == ["step 0", *(f"steps {a} → {b}" for a, b in pairwise(STEPS))]
    assert "%{hovertext}" in heat.hovertemplate
    e.metric = "norm"
    e.wait(60)
    assert list(trace(e, "heat").hovertext[0]) == [f"step {step}" for step in STEPS]


def test_the_colours_show_what_is_unusual_for_each_layer(e: Exploration) -> None:
    e.metric = "norm"
    e.colour = "against its own past"
    e.wait(60)
    heat = trace(e, "heat")
    assert e.code == "h.layers(metric='norm').against_past()"
    assert titles(e)["heat"] == "norm against its own past, model"
    assert heat.zmin == -heat.zmax
    e.colour = "absolute"
    e.wait(60)
    assert trace(e, "heat").zmin > 0
    with pytest.raises(NotFoundError, match="no colour 'past'"):
        e.colour = "past"


def test_the_diff_begins_with_the_last_step_against_the_one_before(e: Exploration) -> None:
    assert (piece(e, "step-a").value, piece(e, "step-b").value) == (STEPS[-2], STEPS[-1])


def test_a_click_on_the_head_of_a_column_sorts_the_diff(e: Exploration) -> None:
    e.pick(30, JUMP)
    e.wait(60)
    for clicks, code in enumerate(("h.diff(30, 40).sort('name')", "h.diff(30, 40).sort('name', True)")):
        piece(e, "diff")._handle_custom_msg({"sort": 0}, [])
        e.wait(60)
        assert e.code == code
        assert e.table["name"].to_pylist() == sorted(e.table["name"].to_pylist(), reverse=bool(clicks))
        assert f"name {'▲▼'[clicks]}" in piece(e, "diff").value
    piece(e, "diff")._handle_custom_msg({"sort": 99}, [])
    piece(e, "diff")._handle_custom_msg({"sort": list(e.table.columns).index("cosine")}, [])
    e.wait(60)
    assert e.code == "h.diff(30, 40).sort('cosine')"
    with pytest.raises(NotFoundError, match="no column 'cosin'; the nearest are cosine, "):
        e.sort("cosin")


def test_the_diff_follows_the_filter(e: Exploration) -> None:
    e.pick(30, JUMP)
    e.filter = "h.1.*"
    e.wait(60)
    assert "h.1.mlp.weight" in piece(e, "diff").value
    assert "head.weight" not in piece(e, "diff").value


def test_a_missing_value_is_not_zero(e: Exploration) -> None:
    e.metric = "norm"
    e.wait(60)
    assert {step for (_, step), value in cells(e).items() if value is None} == {SILENT}
    assert "no statistics of 1 checkpoint" in e.status


def test_colours_of_a_wide_range_are_logarithmic_and_zero_differs_from_a_missing_value(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step, value in ((1, 1.0), (2, 1.0), (3, 1.0001), (4, 2.0)):
        run.checkpoint(step, whole({"h.0.w": torch.full((64,), value)}))
    run.checkpoint(5, whole({"h.0.w": torch.zeros(64)}))
    run.checkpoint(6, whole({"h.0.w": torch.ones(64)}))
    run.close()
    h = Explorer.open(tmp_path)
    h.analyze(quiet=True)
    e = h.explore()
    e.wait(60)
    heat = trace(e, "heat")
    (values,) = h.layers().grid()[2]
    gap, zero, small, large, gone, infinite = heat.z[0]
    assert values[1] == 0.0
    assert gap is None
    assert zero == pytest.approx(math.log10(values[2]) - 1)
    assert (small, large, gone) == pytest.approx([math.log10(value) for value in values[2:5]])
    assert values[5] == math.inf
    assert infinite == gone
    assert list(heat.text[0]) == ["", "", "", "", "", "∞"]
    assert heat.colorbar.ticktext[-1] == "10<sup>0</sup>"
    e.metric = "norm"
    e.wait(60)
    assert trace(e, "heat").colorbar.ticktext is None
    e.close()


def test_the_range_is_seen_and_kept_by_other_gestures(e: Exploration) -> None:
    e.range = (5, 43)
    e.metric = "norm"
    e.wait(60)
    assert e.range == (10, 40)
    assert e.code == "h.layers(metric='norm', first=10, last=40)"
    low, high = e.figure.layout.xaxis.range
    assert 0 < low < 10 < 40 < high < 50
    with pytest.raises(NotFoundError, match="no checkpoint from step 41 to 49; those there are go from 0 to 50"):
        e.range = (41, 49)


def test_a_filter_that_fits_nothing_names_the_nearest_until_it_is_mended(e: Exploration) -> None:
    e.filter = "h.1.mpl.*"
    e.wait(60)
    assert "no tensor fits 'h.1.mpl.*'" in e.status
    assert "the nearest" in e.status
    assert cells(e) == {}
    assert e.table is None
    e.filter = "h.1.mlp.*"
    e.wait(60)
    assert "no tensor" not in e.status
    assert {layer for layer, _ in cells(e)} == {"h.1"}


def test_an_unknown_metric_of_tensors_or_of_the_training_is_reported(e: Exploration) -> None:
    with pytest.raises(NotFoundError, match="no metric 'nrom'; the nearest are norm"):
        e.metric = "nrom"
    with pytest.raises(NotFoundError, match="no timeline 'los'"):
        e.timeline = "los"


def test_the_button_compares_the_steps_picked(e: Exploration, h: Explorer) -> None:
    piece(e, "step-a").value = 30
    piece(e, "step-b").value = JUMP
    piece(e, "diff-button").click()
    e.wait(60)
    assert e.code == "h.diff(30, 40)"
    assert "h.1.mlp.weight" in piece(e, "diff").value


def test_a_missing_step_is_reported_in_one_line(e: Exploration) -> None:
    e.pick(31, JUMP)
    e.wait(60)
    assert "step 31 was not captured" in e.status
    assert "\n" not in e.status
    assert piece(e, "diff").value == ""


def test_long_tables_are_paged(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (1, 2):
        run.checkpoint(step, whole({f"h.{i:02}.w": torch.full((32,), float(i + step)) for i in range(30)}))
    run.close()
    e = Explorer.open(tmp_path).explore()
    e.pick(1, 2)
    e.wait(60)
    shown = piece(e, "diff")
    assert shown.value.count("<tr>") == 1 + 12
    assert "rows 1 to 12 of 30" in shown.value
    assert "h.29.w" not in shown.value
    for _ in range(5):
        piece(e, "diff-next").click()
        e.wait(60)
    assert "rows 25 to 30 of 30" in shown.value
    assert piece(e, "diff-next").disabled
    piece(e, "diff-previous").click()
    e.wait(60)
    assert "rows 13 to 24 of 30" in shown.value
    e.close()


def test_lines_of_code_name_the_run_that_was_named(tmp_path: Path) -> None:
    for number in (1, 2):
        run = Run(tmp_path, f"run-{number}", created=f"2026-11-21T10:15:0{number}+00:00")
        for step in (number, number + 10):
            run.checkpoint(step, whole({"h.0.w": torch.full((64,), float(step))}), loss=1.0)
        run.close()
    h = Explorer.open(tmp_path)
    h.analyze(quiet=True)
    e = h.explore(run="run-1")
    e.wait(60)
    for gesture in (lambda: e.select("h.0", 11), lambda: e.pick(1, 11)):
        gesture()
        e.wait(60)
        assert "run-1" in e.code
        assert eval(e.code, {"h": h}).to_arrow() == e.table.to_arrow()
    assert e.code == "h.diff('run-1:1', 'run-1:11')"
    e.close()


def test_the_line_can_be_copied_and_not_edited(e: Exploration) -> None:
    piece(e, "code").value = "rm -rf"
    assert piece(e, "code").value == e.code


def test_there_is_one_figure_widget(e: Exploration) -> None:
    for gesture in GESTURES.values():
        gesture(e)
    e.wait(60)
    figures = [w for w in ipywidgets.widgets.widget._instances.values() if isinstance(w, go.FigureWidget)]
    assert [figure for figure in figures if figure is e.figure] == [e.figure]
    tree = [piece(e, name) for name in ("figure", "metric", "kind", "filter", "range", "status", "progress")]
    assert sum(isinstance(w, go.FigureWidget) for w in tree) == 1


def test_nothing_runs_after_close_and_the_picture_stays(h: Explorer) -> None:
    e = h.explore()
    e.wait(60)
    before = cells(e)
    e.close()
    assert our_threads() == []
    e.metric = "norm"
    e.select("h.1", JUMP)
    assert our_threads() == []
    assert cells(e) == before
    assert piece(e, "metric").disabled


def test_close_ends_long_work_and_waits_until_it_has_ended(h: Explorer) -> None:
    begun, ended = threading.Event(), []

    def without_end() -> None:
        try:
            with ByteProgress(1, description="without end", quiet=True) as bar:
                while True:
                    begun.set()
                    bar.advance(0)
        finally:
            ended.append(sum(range(3_000_000)))

    e = h.explore()
    e._worker.first({"without end": without_end})
    assert begun.wait(60)
    e.close()
    assert ended
    assert our_threads() == []


def test_an_exploration_that_was_never_shown_ends_with_its_last_reference(h: Explorer) -> None:
    e = h.explore()
    e.wait(60)
    model = e.widget.model_id
    gone = weakref.ref(e)
    del e
    gc.collect()
    assert gone() is None
    assert model not in ipywidgets.widgets.widget._instances


def test_a_shown_exploration_lives_on_without_a_reference(h: Explorer) -> None:
    e = h.explore()
    e._repr_mimebundle_()
    alive = weakref.ref(e)
    del e
    gc.collect()
    assert alive() is not None
    alive().close()
    gc.collect()
    assert alive() is None


def test_an_unexpected_error_is_shown_and_raised(e: Exploration, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Explorer, "diff", broken)
    e.pick(30, JUMP)
    with pytest.raises(ZeroDivisionError):
        e.wait(60)
    assert "a bug" in e.status


def test_the_magics_show_it(h: Explorer, tmp_path: Path) -> None:
    with extended_shell(tmp_path / "ipython") as shell:
        e = shell.run_line_magic("dshistory", f"explore {h.root} h.1.* --kinds exp_avg")
        e.wait(60)
        assert e.code == "h.layers('h.1.*', metric='relative_update', kinds=['exp_avg'])"
        e.close()
        watching = shell.run_line_magic("dshistory", f"watch {h.root} --seconds 0.5")
        watching.close()
        with pytest.raises(UsageError, match="seconds must be a number, not 'often'"):
            shell.run_line_magic("dshistory", f"watch {h.root} --seconds often")
