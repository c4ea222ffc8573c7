"""The explorer shows a clear line and never a traceback where there is little to see, or something wrong."""

import sys
from pathlib import Path

import pytest
import torch
from catalog_helpers import flip_bit
from explorer_helpers import Run, whole
from widget_helpers import JUMP, STEPS, cells, click, layered_history, piece, trace

from catalog.errors import SetupError
from catalog.run_writer import create_history
from dshistory.explorer import Explorer


@pytest.fixture(scope="module")
def h(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    return layered_history(tmp_path_factory.mktemp("widgets") / "history")


def test_a_damaged_file_gives_one_line_and_no_traceback(tmp_path: Path) -> None:
    h = layered_history(tmp_path / "history")
    flip_bit(h.history.paths.data("run-a", 40, 0), offset=4096 + 100)
    e = h.explore()
    e.pick(30, 40)
    e.wait(60)
    assert "damaged" in e.status or "checksum" in e.status or "bytes" in e.status
    assert "Traceback" not in e.status
    e.metric = "norm"
    e.wait(60)
    assert len(cells(e)) == 3 * len(STEPS), "what needs no reading is shown all the same"
    e.close()


@pytest.mark.parametrize("runs", [0, 1])
def test_an_empty_history_says_so(tmp_path: Path, runs: int) -> None:
    if runs:
        Run(tmp_path).close()
    else:
        create_history(tmp_path)
    e = Explorer.open(tmp_path).explore()
    assert e.wait(60)
    assert ("no checkpoint of run run-a" if runs else "no run") in e.status
    assert e.range is None
    assert "yet" in e._repr_mimebundle_()["text/html"]
    e.close()


def test_a_history_without_statistics_says_what_computes_them(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoint(7, whole({"h.0.w": torch.ones(64)}), loss=1.0)
    run.close()
    e = Explorer.open(tmp_path).explore()
    e.wait(60)
    assert "statistics yet: `analyze` computes them" in e.status
    assert list(trace(e, "checkpoints").x) == [7]
    assert e.range == (7, 7)
    e.select("h.0.w", 7)
    e.wait(60)
    assert list(trace(e, "detail").x) == [7]
    e.close()


def test_one_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoint(7, whole({"h.0.w": torch.ones(64)}))
    run.close()
    h = Explorer.open(tmp_path)
    h.analyze(quiet=True)
    e = h.explore()
    e.metric = "norm"
    e.wait(60)
    assert cells(e) == {("h.0", 7): 8.0}
    assert list(trace(e, "checkpoints").y) == [0.0], "seen also where no loss was logged"
    e.close()


def test_names_are_escaped_wherever_they_are_shown(tmp_path: Path) -> None:
    bad = "<b>\n0</b>.w"
    h = layered_history(tmp_path / "history", names=[bad])
    e = h.explore()
    e.wait(60)
    shown = "&lt;b&gt;\\n0&lt;/b&gt;"
    assert shown in trace(e, "heat").y
    click(e, shown, JUMP)
    e.wait(60)
    assert repr(bad) in e.code
    assert len(e.table) == len(STEPS)
    assert "<b>" not in "".join(trace(e, "detail").text)
    e.pick(30, JUMP)
    e.wait(60)
    page = e._repr_mimebundle_()["text/html"]
    assert shown in page
    e.filter = "<b>1"
    e.wait(60)
    for shown in (page, piece(e, "diff").value, piece(e, "status").value, e._repr_mimebundle_()["text/html"]):
        assert "<b>" not in shown
    assert "<b>1" in e.status
    e.close()


@pytest.mark.parametrize("package", ["ipywidgets", "anywidget"])
def test_without_the_extra_it_is_named(h: Explorer, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for show in (h.explore, h.watch):
        with pytest.raises(SetupError, match=rf"needs {package}.*dshistory\[notebook\]"):
            show()
