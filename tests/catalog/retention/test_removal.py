"""Wherever a removal is cut off, each checkpoint is whole or not there; the next collection leaves nothing of it."""

import shutil
from pathlib import Path

import pytest
from catalog_helpers import Run
from retention_helpers import commit, contents, cut_off, model_extents

from catalog.access.pins import pinned
from catalog.errors import SetupError
from catalog.gc import collect_garbage
from catalog.history import History
from catalog.index import index
from catalog.records import CheckpointRef
from catalog.retention.facts import FactsReader
from catalog.retention.policy import policy_of
from catalog.retention.prune import prune, remove
from catalog.retention.removal import remove_checkpoints
from catalog.verify import verify

STEPS = range(0, 60, 10)


@pytest.fixture
def history(tmp_path: Path) -> History:
    """Return a history whose steps 30 and 50 refer to the bytes of step 10, of a run that nobody writes."""
    return make(tmp_path / "h")


def make(root: Path) -> History:
    with Run(root) as run:
        history = History.open(root)
        for step in STEPS:
            frozen = model_extents(history, ref(10))["frozen"] if step in (30, 50) else None
            own = {"w": b"%4d" % step} | ({} if frozen else {"frozen": b"never changes"})
            commit(run, step, own, refer={"frozen": frozen} if frozen else None, loss=float(step))
        run.register(patience_s=10.0)
    return history


def ref(step: int) -> CheckpointRef:
    return CheckpointRef("run-a", step)


def assert_contents(history: History) -> None:
    """Assert that everything that is listed has its bytes, as a restore reads them."""
    for step in history.steps("run-a"):
        assert contents(history, ref(step)) == {"w": b"%4d" % step, "frozen": b"never changes"}


def is_whole(history: History) -> bool:
    """Return whether everything that is listed has its bytes, also by the checksums of all files."""
    assert_contents(history)
    return verify(history) == []


def leftovers(history: History) -> list[str]:
    return [path.name for path in history.paths.steps_dir("run-a").iterdir() if path.name.startswith(".")]


def test_what_a_policy_does_not_keep_goes_and_the_index_follows(history: History) -> None:
    done = prune(history, policy_of("last 1"), runs=["run-a"], dry_run=False)
    assert sorted(done.removed) == [ref(0), ref(20), ref(30), ref(40)]
    assert done.kept == {ref(10): "run-a:50 refers to its bytes", ref(50): "the newest"}
    assert history.steps("run-a") == [10, 50]
    assert is_whole(history)
    assert leftovers(history) == []
    assert history.query("SELECT step FROM checkpoints ORDER BY step")["step"].to_pylist() == [10, 50]
    index.register(history.paths)
    assert history.gone() == []
    events = history.query("SELECT step, detail FROM events WHERE name = 'removed' ORDER BY step").to_pylist()
    assert [event["step"] for event in events] == [0, 20, 30, 40]
    assert "no rule of 'last 1' keeps it" in events[0]["detail"]
    assert history.query("SELECT count(*) AS n FROM metrics WHERE name = 'loss'")["n"].to_pylist() == [6]


def test_a_dry_run_changes_nothing(history: History) -> None:
    before = sorted(history.root.rglob("*"))
    assert len(prune(history, policy_of("last 1"), runs=["run-a"], dry_run=True).removed) == 4
    assert sorted(history.root.rglob("*")) == before


@pytest.mark.guards("A removed checkpoint is removed whole")
def test_a_removal_that_is_cut_off_anywhere(tmp_path: Path) -> None:
    made = make(tmp_path / "h").root
    for after in range(100):
        shutil.copytree(made, tmp_path / str(after))
        history = History.open(tmp_path / str(after))
        with cut_off(after) as cut:
            remove(history, [ref(10), ref(30), ref(50)], force=False, dry_run=False)
        assert {0, 20, 40} <= set(history.steps("run-a"))
        assert_contents(history)
        assert collect_garbage(history.paths).kept == []
        assert leftovers(history) == []
        assert_contents(history)
        if after % 7 == 0 or not cut.happened:
            assert history.gone() == []
            index.register(history.paths)
            assert verify(history) == []
        if not cut.happened:
            break
    assert after > 15
    assert history.steps("run-a") == [0, 20, 40]


def test_what_somebody_reads_stays_with_what_it_needs(history: History) -> None:
    facts = FactsReader(history).line("run-a")
    with pinned(history.paths, ref(50)):
        done = remove_checkpoints(history.paths, facts, {one.ref: "a test" for one in facts})
    assert done.left == {ref(50): "a reader has it open", ref(10): "a checkpoint that was left refers to its bytes"}
    assert history.steps("run-a") == [10, 50]
    assert is_whole(history)


def test_files_of_somebody_else_keep_their_checkpoint(history: History) -> None:
    (history.paths.step_dir("run-a", 0) / "notes.txt").write_text("mine")
    done = prune(history, policy_of("last 1"), runs=["run-a"], dry_run=False)
    assert "notes.txt" in done.left["run-a:0"]
    assert history.steps("run-a") == [0, 10, 50]
    assert is_whole(history)


def test_what_cannot_be_read_holds_all_that_it_may_need(history: History) -> None:
    manifest = history.paths.manifest("run-a", 40, 0)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    done = prune(history, policy_of("last 1"), runs=["run-a"], dry_run=False)
    assert done.removed == {}
    assert done.kept[ref(40)].startswith("damaged, and left to you: it can't be read")
    assert done.kept[ref(0)] == "run-a:40 refers to its bytes"


def test_a_run_that_is_being_written_is_left_to_its_session(tmp_path: Path) -> None:
    with Run(tmp_path / "h") as run:
        for step in range(3):
            commit(run, step, {"w": b"1"})
        history = History.open(tmp_path / "h")
        done = prune(history, policy_of("last 1"), runs=["run-a"], dry_run=False)
        assert (done.removed, list(done.left)) == ({}, ["run run-a"])
        with pytest.raises(SetupError, match=r"is being written.*nothing was removed"):
            remove(history, [ref(0)], force=True, dry_run=False)
    assert len(prune(history, policy_of("last 1"), runs=["run-a"], dry_run=False).removed) == 2


def test_removal_by_name_takes_all_or_none(history: History) -> None:
    with pytest.raises(SetupError, match="run-a:10: run-a:30 refers to its bytes"):
        remove(history, [ref(0), ref(10)], force=True, dry_run=False)
    assert len(history.steps("run-a")) == 6
    remove(history, [ref(10), ref(30), ref(50)], force=False, dry_run=False)
    assert history.steps("run-a") == [0, 20, 40]
    assert is_whole(history)
    with pytest.raises(SetupError, match="the newest healthy one of its run"):
        remove(history, [ref(0), ref(20), ref(40)], force=False, dry_run=False)
    remove(history, [ref(0), ref(20), ref(40)], force=True, dry_run=False)
    assert history.steps("run-a") == []


def test_a_child_holds_the_step_that_it_goes_on_from(history: History) -> None:
    with Run(history.root, "run-b", parent=("run-a", 20)) as child:
        commit(child, 25, {"w": b"5"})
    done = prune(history, policy_of("last 1"), runs=["run-a", "run-b"], dry_run=False)
    assert done.kept[ref(20)] == "run run-b goes on from it"
    with pytest.raises(SetupError, match="run-b goes on from it: force=True"):
        remove(history, [ref(20)], force=False, dry_run=False)
    remove(history, [ref(20)], force=True, dry_run=False)
    assert history.steps("run-a") == [10, 50]


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        ("tagged", "keeps none of 6 checkpoints"),
        ("best 2 by accuracy", "recorded metrics are loss"),
        ("last 2, best 2 by accuracy", "finds no checkpoint with such a metric"),
        ("1B", "the budget of 1 bytes can't be met"),
    ],
)
def test_a_policy_that_keeps_nothing_or_cannot_be_met_is_refused(history: History, keep: str, told: str) -> None:
    with pytest.raises(SetupError, match=told):
        prune(history, policy_of(keep), runs=["run-a"], dry_run=False)
    assert len(history.steps("run-a")) == 6


def test_a_nan_in_the_loss_or_in_the_statistics_is_not_healthy(tmp_path: Path) -> None:
    with Run(tmp_path / "h") as run:
        for step in range(4):
            commit(run, step, {"w": b"1"}, loss=float("nan") if step > 1 else 1.0)
        run.register(patience_s=10.0)
    history = History.open(tmp_path / "h")
    assert [one.healthy for one in FactsReader(history).line("run-a")] == [None, None, False, False]
    prune(history, policy_of("last 1"), runs=["run-a"], dry_run=False)
    assert history.steps("run-a") == [1, 3]
