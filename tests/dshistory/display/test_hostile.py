"""Names from a history are data: no HTML, text or figure lets one become markup or steer a terminal."""

import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
import torch
from explorer_helpers import Piece, Run, whole

from dshistory.commands.cli import main
from dshistory.explorer import Explorer

SCRIPT = "<script>alert(1)</script>"
IMAGE = "<img src=x onerror=alert(1)>"
LINK = '<a href="javascript:alert(1)">x</a>'
ESCAPE = "\x1b]0;title\x07\x1b[31m"
NAMES = (f"layers.0.{SCRIPT}", f"layers.1.{IMAGE}{ESCAPE}", f"layers.2.%{{x}}{LINK}", "plain")


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    run = Run(tmp_path_factory.mktemp("hostile") / "history")
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(4, 8, generator=generator) for name in NAMES}
    for step in range(6):
        weights = {name: weight * 1.01 for name, weight in weights.items()}
        if step == 5:
            weights = {name: torch.full((4, 8), float("nan")) for name in NAMES}
        pieces = [
            *whole(weights),
            *whole(weights, kind=IMAGE),
            Piece(f"counters{SCRIPT}", torch.tensor(list(b"{}"), dtype=torch.uint8), "object"),
        ]
        run.checkpoint(step, pieces, **{"loss": 1.0, f"own{SCRIPT}": 2.0, f"x{ESCAPE}": 1.0})
    run.tag(f"tag{SCRIPT}", 3)
    run.tag(f"tag{ESCAPE}", 3)
    run.close()
    explorer = Explorer.open(run.root)
    explorer.analyze(quiet=True)
    return explorer


TABLES: dict[str, Callable[[Explorer], Any]] = {
    "overview": lambda h: h,
    "log": lambda h: h.log(),
    "show": lambda h: h.show(3),
    "tags": lambda h: h.tags(),
    "diff": lambda h: h.diff(0, 3, kinds="*"),
    "diff by layer": lambda h: h.diff(0, 3, by="layer", kinds="*"),
    "drill down": lambda h: h.diff(0, 3, tensor=NAMES[1]),
    "trajectory": lambda h: h.trajectory(kinds="*"),
    "distances": lambda h: h.distances(names=["layers.0*", "plain"]),
    "path": lambda h: h.distances().path(),
    "anomalies": lambda h: h.anomalies(),
    "diagnose": lambda h: h.diagnose(quiet=True),
    "sql": lambda h: h.sql("SELECT DISTINCT kind, name FROM tensors"),
    "verify": lambda h: h.verify(quiet=True),
    "restored": lambda h: h.restore(3),
    "export": lambda h: h.export(3, h.root.parent / f"export{SCRIPT.replace('/', '')}.pt", format="torch"),
}
PLOTS = ("log", "diff", "diff by layer", "drill down", "trajectory", "distances")


@pytest.mark.parametrize("what", TABLES)
def test_no_name_is_markup_in_html_or_a_command_in_text(explorer: Explorer, what: str) -> None:
    shown = TABLES[what](explorer)
    html, text = shown._repr_html_(), repr(shown)
    for part in ("<script", "<img", "<a ", "\x1b", "\x07"):
        assert part not in html.replace("<style>", ""), part
    assert not any(character < " " and character != "\n" for character in text)
    if what not in ("overview", "path", "distances", "verify"):
        assert "&lt;" in html


@pytest.mark.parametrize("what", PLOTS)
def test_no_name_is_markup_in_a_figure(explorer: Explorer, what: str) -> None:
    figure = json.dumps(TABLES[what](explorer).plot().to_plotly_json(), default=list)
    for part in ("<script", "<img", "<a ", "\\u001b"):
        assert part not in figure


@pytest.mark.parametrize("words", [("tensor", "layers.1.nothing"), ("show", "tagg"), ("trajectory", "layers.1.x")])
def test_no_name_steers_the_terminal_in_a_message(explorer: Explorer, words: tuple[str, ...]) -> None:
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        assert main([words[0], str(explorer.root), *words[1:]]) == 2
    assert stdout.getvalue() == ""
    assert "\x1b" not in stderr.getvalue()
    assert "\x07" not in stderr.getvalue()
