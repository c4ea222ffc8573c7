"""The live explorer shows what another process commits while it runs, and leaves nothing behind when it ends."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from explorer_helpers import Run, whole
from places import ROOT, SUPPORT
from widget_helpers import piece, trace, when

from catalog.errors import SetupError
from catalog.history import History
from catalog.paths import HistoryPaths
from catalog.run_writer import create_history
from dshistory.explorer import Explorer
from dshistory.widgets.watching import Watcher

pytestmark = pytest.mark.slow

TRAIN = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import capture
from capture_helpers import make, one_step

model, optimizer = make(64)
with capture.enable(model, optimizer=optimizer, history=sys.argv[1], every=1, stats_every=1) as session:
    session.wait()
    print("ready", flush=True)
    for _ in sys.stdin:
        loss = one_step(model, optimizer)
        session.log(loss=loss)
        session.wait()
"""
PATIENCE_S = 60
OFTEN = 0.02


@contextmanager
def training(history: Path) -> Iterator[Any]:
    """Start a training process that takes a step, and a checkpoint, for each line that it is given."""
    command = [sys.executable, "-c", TRAIN, str(history)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.stdin
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def step(stdin: Any) -> None:
    stdin.write("\n")
    stdin.flush()


def offered(e: Any, at: int) -> threading.Event:
    """Return an event that is set as soon as the slider knows the step."""
    slider = piece(e, "range")
    return when(slider, "_options_labels", lambda: str(at) in slider._options_labels)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("dshistory")]


def test_commits_of_a_training_appear_while_it_runs(history: Path) -> None:
    with training(history) as stdin:
        e = Explorer.open(history).watch(seconds=OFTEN)
        for expected in (1, 2, 3):
            seen = offered(e, expected)
            step(stdin)
            assert seen.wait(PATIENCE_S)
        updates = when(e.figure, "_py2js_update", lambda: any(line[-1] for line in trace(e, "heat").z or ()))
        assert updates.wait(PATIENCE_S), "its statistics come a little later, and are shown too"
        e.wait(PATIENCE_S)
        assert list(trace(e, "checkpoints").x) == [0, 1, 2, 3]
        assert list(trace(e, "heat").x) == [0, 1, 2, 3]
        assert piece(e, "range").value == (0, 3)
        e.close()
        assert watchers() == []


def grown(tmp_path: Path, *, seconds: float = OFTEN) -> tuple[Run, Any]:
    run = Run(tmp_path)
    for at in (1, 2, 3):
        run.checkpoint(at, whole({"h.0.w": torch.full((64,), float(at))}), loss=1.0)
    e = Explorer.open(tmp_path).watch(seconds=seconds)
    e.wait(PATIENCE_S)
    return run, e


def one_more(run: Run, e: Any, at: int) -> None:
    seen = offered(e, at)
    run.checkpoint(at, whole({"h.0.w": torch.full((64,), float(at))}), loss=0.5)
    assert seen.wait(PATIENCE_S)
    e.wait(PATIENCE_S)


def test_the_selection_of_a_person_stays(tmp_path: Path) -> None:
    run, e = grown(tmp_path)
    e.range = (1, 2)
    e.timeline = "loss"
    piece(e, "step-a").value = 1
    e.wait(PATIENCE_S)
    one_more(run, e, 4)
    assert e.range == (1, 2)
    assert piece(e, "step-a").value == 1
    assert piece(e, "step-b").value == 4, "the newest stays the newest"
    e.close()
    run.close()


def test_a_cell_that_is_run_again_leaves_no_watcher_behind(tmp_path: Path) -> None:
    run, first = grown(tmp_path)
    explorer = Explorer.open(tmp_path)
    again = [explorer.watch(seconds=OFTEN) for _ in range(4)]
    other = Explorer.open(tmp_path).watch(seconds=OFTEN)
    assert len([thread for thread in watchers() if thread.name == "dshistory-watch"]) == 3, "one of each explorer"
    one_more(run, again[-1], 4)
    for e in (first, other, *again):
        e.close()
    assert not watchers()
    run.close()


def test_a_refresh_keeps_the_code_and_the_table(tmp_path: Path) -> None:
    run, e = grown(tmp_path)
    e.pick(1, 2)
    e.wait(PATIENCE_S)
    code, table = e.code, e.table
    one_more(run, e, 4)
    assert (e.code, e.table) == (code, table)
    e.close()
    run.close()


class Changes:
    """Counts the calls of a watcher."""

    def __init__(self) -> None:
        self.seen = threading.Event()

    def note(self) -> None:
        self.seen.set()


def test_a_marker_is_seen_in_the_listing_of_its_folder(tmp_path: Path) -> None:
    """Opening this one, or asking for its size, says that it is not there."""
    run = Run(tmp_path)
    paths = HistoryPaths(tmp_path)
    folder = paths.step_dir(run.run, 1)
    folder.mkdir(parents=True)
    changes = Changes()
    watcher = Watcher(History.open(tmp_path), run.run, changes.note, seconds=OFTEN)
    watcher.start()
    paths.marker(run.run, 1).symlink_to(tmp_path / "nothing")
    assert changes.seen.wait(PATIENCE_S)
    watcher.close()
    run.close()


def test_a_run_that_begins_is_followed(tmp_path: Path) -> None:
    create_history(tmp_path)
    e = Explorer.open(tmp_path).watch(seconds=OFTEN)
    e.wait(PATIENCE_S)
    assert "no run" in e.status
    run = Run(tmp_path)
    one_more(run, e, 5)
    assert "no run" not in e.status
    assert e.range == (5, 5)
    e.close()
    run.close()


def test_nothing_is_read_after_close(tmp_path: Path) -> None:
    run, e = grown(tmp_path)
    e.close()
    assert watchers() == []
    run.checkpoint(4, whole({"h.0.w": torch.ones(64)}))
    assert list(trace(e, "checkpoints").x) == [1, 2, 3]
    run.close()


def test_it_ends_when_nobody_holds_it(tmp_path: Path) -> None:
    run, e = grown(tmp_path)
    (thread,) = [thread for thread in watchers() if thread.name == "dshistory-watch"]
    del e
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    run.close()


def test_an_interpreter_that_ends_does_not_wait_for_it(tmp_path: Path) -> None:
    Run(tmp_path).close()
    program = "import sys, dshistory; e = dshistory.Explorer.open(sys.argv[1]).watch(seconds=3600); print('shown')"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "shown\n", "")


def test_it_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, e = grown(tmp_path)
    one_more(run, e, 4)
    e.close()
    run.close()
    assert capsys.readouterr() == ("", "")


def test_a_refresh_reports_only_news(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoint(1, whole({"w": torch.ones(64)}))

    class Listener:
        def told(self) -> None:
            raise AssertionError("nothing is new")

    listener = Listener()
    watcher = Watcher(Explorer.open(tmp_path).history, None, listener.told, seconds=OFTEN)
    before = watcher._snapshot()
    assert watcher._snapshot() == before
    run.metrics(2, loss=1.0)
    with_metrics = watcher._snapshot()
    assert with_metrics != before
    Explorer.open(tmp_path).analyze(quiet=True)
    assert watcher._snapshot() != with_metrics
    run.close()


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_seconds_must_be_positive(tmp_path: Path, seconds: float) -> None:
    Run(tmp_path).close()
    with pytest.raises(SetupError, match="seconds must be more than 0"):
        Explorer.open(tmp_path).watch(seconds=seconds)
    assert watchers() == []
