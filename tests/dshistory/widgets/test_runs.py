"""Runs are chosen and compared in the widget, and the line of Python of each gesture gives the same."""

import re
from pathlib import Path

import pytest
from widget_helpers import JUMP, layered_history, piece, second_run

from catalog.errors import NotFoundError
from dshistory.explorer import Explorer
from dshistory.widgets import Exploration


@pytest.fixture(scope="module")
def h(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    explorer = layered_history(tmp_path_factory.mktemp("runs") / "history")
    second_run(explorer)
    return explorer


def click_run(e: Exploration, row: int) -> None:
    """Send the message of a click on a row of the runs."""
    piece(e, "runs")._handle_custom_msg({"row": row}, [])
    assert e.wait(60)


def drawn(e: Exploration) -> list[str]:
    """Return the texts of the picture."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", piece(e, "comparison").value)


def test_the_tree_of_runs_is_listed(e: Exploration) -> None:
    assert e.code == "h.layers(metric='relative_update')", "to list the runs is no gesture"
    listed = piece(e, "runs").value
    assert listed.index("run-a") < listed.index("└─o") < listed.index("lr_scale 0.5")
    assert piece(e, "runs").chosen == []
    assert piece(e, "picture").layout.display == "none"


def test_runs_that_are_clicked_are_compared(e: Exploration, h: Explorer) -> None:
    click_run(e, 1)
    assert (e.code, piece(e, "runs").chosen) == ("h.runs()", [1])
    assert e.table.to_arrow() == h.runs().to_arrow()
    click_run(e, 0)
    assert e.code == "h.compare('again', 'run-a').plot()"
    assert piece(e, "code").value == e.code
    assert sorted(piece(e, "runs").chosen) == [0, 1]
    assert e.table.to_arrow() == h.compare("again", "run-a", quiet=True).to_arrow()
    assert "run-a parts from again at step 40" in e.status
    assert {"again", "run-a", "loss"} <= set(drawn(e))
    figure = eval(e.code, {"h": h})
    assert [line.y[-1] for line in figure.data] == [1.75, 1.9]
    click_run(e, 1)
    assert (e.code, piece(e, "runs").chosen, piece(e, "comparison").value) == ("h.runs()", [0], "")
    click_run(e, 7)
    assert e.code == "h.runs()"


def test_the_picture_is_chosen(e: Exploration, h: Explorer) -> None:
    e.compare("run-a", "aga")
    e.picture = "layers"
    e.wait(60)
    assert e.code == "h.compare('run-a', 'again').plot('layers')"
    assert list(eval(e.code, {"h": h}).data[0].y)[0] == "h.0", "the layer that parts first"
    assert {"h.0", "h.1", "head"} <= set(drawn(e))
    e.picture = "lr"
    e.wait(60)
    assert e.code == "h.compare('run-a', 'again').plot('lr')"
    assert "lr" in drawn(e)
    assert e.table["furthest_layer"].to_pylist()[-2] == "h.0"
    with pytest.raises(NotFoundError, match="no picture 'distence'; the nearest is distance"):
        e.picture = "distence"
    with pytest.raises(NotFoundError, match="no run 'other'"):
        e.compare("run-a", "other")


def test_only_the_chosen_tensors_are_compared(e: Exploration) -> None:
    e.filter = "head*"
    e.compare("run-a", "again")
    e.wait(60)
    assert e.code == "h.compare('run-a', 'again', names='head*').plot()"
    assert {row["layer"] for row in e.table.layers} == {"head"}


def test_another_gesture_leaves_the_comparison_where_it_is(e: Exploration) -> None:
    e.compare("run-a", "again")
    e.wait(60)
    shown = piece(e, "comparison").value
    e.pick(30, JUMP)
    e.wait(60)
    assert e.code == f"h.diff(30, {JUMP})"
    e.refresh()
    e.wait(60)
    assert piece(e, "comparison").value == shown
    assert e.code == f"h.diff(30, {JUMP})"


def test_one_run_is_no_list(tmp_path: Path) -> None:
    with_one = layered_history(tmp_path / "history").explore()
    assert with_one.wait(60)
    (box,) = [one for one in with_one.widget.children if piece(with_one, "runs") in getattr(one, "children", ())]
    assert box.layout.display == "none"
    with_one.close()
