"""A written reference finds its checkpoint in the tree of runs, and the error names the nearest."""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalog_helpers import Run, pieces_of

from catalog import references
from catalog.errors import FormatError, NotFoundError, SetupError
from catalog.history import History
from catalog.paths import HistoryPaths
from catalog.read.runs import is_committed, step_dirs
from catalog.records import CheckpointRef
from catalog.references import lineage


def _run(
    root: Path, run: str, steps: list[int], *, day: int, parent: tuple[str, int] | None = None, replay: bool = False
) -> None:
    created = f"2026-11-{day:02d}T00:00:00+00:00"
    with Run(root, run=run, parent=parent, created=created, facts={"replay": True} if replay else {}) as writer:
        for step in steps:
            writer.checkpoint(step, pieces_of({"w": bytes([step])}), register=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> History:
    """The tree is a: 0 10 20 30; b from a:20: 20 25; c from b:25: 25 40; and the newest run r is a replay of c:40."""
    root = tmp_path_factory.mktemp("resolve") / "history"
    _run(root, "a", [0, 10, 20, 30], day=1)
    _run(root, "b", [20, 25], day=2, parent=("a", 20))
    _run(root, "c", [25, 40], day=3, parent=("b", 25))
    _run(root, "r", [41], day=4, parent=("c", 40), replay=True)
    return History.open(root)


def test_the_lineage_goes_through_the_parents_before_each_fork(tree: History) -> None:
    assert [str(ref) for ref in lineage(tree.paths, "c")] == ["a:0", "a:10", "b:20", "c:25", "c:40"]
    assert [str(ref) for ref in lineage(tree.paths, "b")] == ["a:0", "a:10", "b:20", "b:25"]
    assert [str(ref) for ref in lineage(tree.paths, "a")] == ["a:0", "a:10", "a:20", "a:30"]


@pytest.mark.parametrize(
    ("ref", "found"),
    [
        (40, "c:40"),
        ("40", "c:40"),
        (25, "c:25"),
        (20, "b:20"),
        (10, "a:10"),
        ("latest", "c:40"),
        (-1, "c:40"),
        ("-1", "c:40"),
        (-2, "c:25"),
        (-5, "a:0"),
        ("a:30", "a:30"),
        ("a:-1", "a:30"),
        ("a:-2", "a:20"),
        ("a:latest", "a:30"),
        ("b:20", "b:20"),
        ("r:41", "r:41"),
        (CheckpointRef("b", 25), "b:25"),
    ],
    ids=str,
)
def test_references_find_their_checkpoints(tree: History, ref: int | str, found: str) -> None:
    assert str(tree.resolve(ref)) == found


def test_the_lineage_in_sql_is_that_of_the_folders(tree: History) -> None:
    rows = tree.query("SELECT run, step FROM lineage ORDER BY step").to_pylist()
    assert [f"{row['run']}:{row['step']}" for row in rows] == [str(ref) for ref in lineage(tree.paths, "c")]


def test_the_lineage_in_sql_has_the_steps_between_checkpoints_too(tmp_path: Path) -> None:
    for day, (run, parent) in enumerate({"a": None, "b": ("a", 2)}.items(), start=1):
        with Run(tmp_path, run=run, parent=parent, created=f"2026-11-{day:02d}T00:00:00+00:00") as writer:
            for step in range(1 if parent is None else 3, 5):
                writer.writers[0].journal.metric(step, "loss", float(step))
    rows = History.open(tmp_path).query("SELECT run, step FROM lineage ORDER BY step").to_pylist()
    assert [tuple(row.values()) for row in rows] == [("a", 1), ("a", 2), ("b", 3), ("b", 4)]


def test_a_replay_never_becomes_current(tree: History) -> None:
    assert tree.current_run() == "c"


@pytest.mark.parametrize(
    ("ref", "match"),
    [
        (15, "nearest are 10 and 20"),
        (41, "nearest is 40"),
        (-6, "has only 5"),
        ("a:25", "nearest are 20 and 30"),
        ("a:x", "a step is expected"),
        ("a:-5", "run a .* has only 4"),
        ("zz:latest", "no run 'zz'"),
        ("a:best", "no captured step of run a"),
        ("a", "is a run .* as 'a:latest'"),
        ("zz:1", "no run 'zz'"),
        ("lattest", "neither a step.*the nearest are latest"),
        ("", "neither a step"),
        ("../a", "neither a step"),
        ("best", "no 'best'"),
        (CheckpointRef("a", 11), "nearest are 10 and 20"),
    ],
    ids=str,
)
def test_a_missing_checkpoint_is_reported_with_the_nearest(tree: History, ref: int | str, match: str) -> None:
    with pytest.raises(NotFoundError, match=match):
        tree.resolve(ref)


def test_a_reference_cannot_leave_the_history(tree: History) -> None:
    with pytest.raises(FormatError, match="run id"):
        tree.resolve("../../etc:1")


def test_few_of_many_steps_are_looked_at(tree: History, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(references, "is_committed", lambda *place: looked.append(place[1:]) or is_committed(*place))
    assert str(tree.resolve("latest")) == "c:40"
    assert str(tree.resolve(-3)) == "b:20"
    assert str(tree.resolve(10)) == "a:10"
    # A step without a marker of its own is passed over.
    tree.paths.step_dir("c", 50).mkdir()
    assert str(tree.resolve("c:latest")) == "c:40"
    tree.paths.step_dir("c", 50).rmdir()
    assert looked == [("c", 40)] + [("c", 40), ("c", 25), ("b", 20)] + [("c", 10), ("b", 10), ("a", 10)] + [
        ("c", 50),
        ("c", 40),
    ]


def test_only_the_runs_that_hold_the_newest_checkpoints_are_listed(
    tree: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    monkeypatch.setattr(references, "step_dirs", lambda paths, run: listed.append(run) or step_dirs(paths, run))
    for ref, runs in ((-1, ["c"]), (-2, ["c", "b"]), (-4, ["c", "b", "a"]), (20, []), ("b:latest", ["b"])):
        listed.clear()
        tree.resolve(ref)
        assert listed == runs, ref


@pytest.mark.parametrize("seed", range(5))
def test_the_newest_checkpoints_are_those_of_the_whole_lineage(tmp_path: Path, seed: int) -> None:
    """Runs that fork anywhere, also before their parent's own fork, with steps before and after the fork."""
    draw = random.Random(seed)
    last: list[tuple[str, int]] = []
    for day, run in enumerate("abcdef", start=1):
        parent = draw.choice(last[-8:]) if last else None
        steps = sorted(draw.sample(range(30), draw.randint(0, 6)))
        _run(tmp_path, run, steps, day=day, parent=parent)
        last += [(run, draw.randint(0, 30)) for _ in range(2)]
    history = History.open(tmp_path)
    for run in "abcdef":
        owner: dict[int, str] = {}
        for one, limit in reversed(references.generations(history.paths, run)):
            owner |= {step: one for step in history.steps(one) if limit is None or step <= limit}
        whole = [CheckpointRef(owner[step], step) for step in sorted(owner)]
        assert lineage(history.paths, run) == whole
        for back in range(1, len(whole) + 1):
            assert references.resolve(history.paths, -back, run) == whole[-back]
        with pytest.raises(NotFoundError):
            references.resolve(history.paths, -len(whole) - 1, run)


def test_runs_come_oldest_first(tree: History) -> None:
    assert [facts.run for facts in tree.runs()] == ["a", "b", "c", "r"]


def test_tags_and_best(history: Path) -> None:
    with Run(history) as run:
        for step, loss in ((0, 3.0), (10, 1.0), (20, 2.0), (30, float("nan"))):
            run.checkpoint(step, pieces_of({"w": b"1"}), loss=loss)
        run.writers[0].journal.metric(25, "loss", 0.1)
        run.writers[0].journal.tag("good", 10)
        run.writers[0].journal.tag("good", 20)
        run.writers[0].journal.tag("lost", 15)
        run.writers[0].journal.flush()
        opened = History.open(history)
        assert str(opened.resolve("best")) == "run-a:10"
        assert str(opened.resolve("good")) == "run-a:20"
        with pytest.raises(NotFoundError, match="the nearest is good"):
            opened.resolve("goood")
        with pytest.raises(NotFoundError, match="step 15 was not captured"):
            opened.resolve("lost")


def test_best_counts_the_parents_losses_too(history: Path) -> None:
    with Run(history, run="a", created="2026-11-01T00:00:00+00:00") as run:
        run.checkpoint(0, pieces_of({"w": b"1"}), loss=0.5)
        run.checkpoint(10, pieces_of({"w": b"1"}), loss=2.0)
    with Run(history, run="b", parent=("a", 10), created="2026-11-02T00:00:00+00:00") as run:
        run.checkpoint(20, pieces_of({"w": b"1"}), loss=1.0)
    assert str(History.open(history).resolve("best")) == "a:0"
    assert str(History.open(history).resolve("b:best")) == "b:20"


def test_a_history_without_checkpoints_says_so(history: Path) -> None:
    with Run(history):
        pass
    with pytest.raises(NotFoundError, match="no committed checkpoint"):
        History.open(history).resolve("latest")


def test_no_history_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"capture\.enable"):
        History.open(tmp_path)


@pytest.mark.parametrize("damage", ["linked", "changed"])
def test_a_parent_that_cannot_be_trusted_is_refused_by_every_name(history: Path, tmp_path: Path, damage: str) -> None:
    _run(history, "a", [0, 5], day=1)
    _run(history, "b", [10], day=2, parent=("a", 5))
    paths = History.open(history).paths
    if damage == "linked":
        paths.run_dir("a").rename(tmp_path / "elsewhere")
        paths.run_dir("a").symlink_to(tmp_path / "elsewhere")
    else:
        paths.run_json("a").write_bytes(paths.run_json("b").read_bytes())
    for ref in (5, -2, "a:5"):
        with pytest.raises(FormatError, match="runs/a"):
            references.resolve(paths, ref, run=None if isinstance(ref, str) else "b")
    assert str(references.resolve(paths, -1, run="b")) == "b:10", "it is the child's own"


def test_a_parent_that_is_removed_meanwhile_ends_the_lineage(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(history, "a", [0, 5], day=1)
    _run(history, "b", [10], day=2, parent=("a", 5))
    paths = History.open(history).paths

    def remove_and_list(paths: HistoryPaths, run: str) -> list[int]:
        shutil.rmtree(paths.run_dir("a"), ignore_errors=True)
        return step_dirs(paths, run)

    monkeypatch.setattr(references, "step_dirs", remove_and_list)
    assert [str(ref) for ref in lineage(paths, "b")] == ["b:10"]


def test_parents_in_a_circle_end(history: Path) -> None:
    _run(history, "a", [0], day=1, parent=("b", 5))
    _run(history, "b", [5], day=2, parent=("a", 0))
    assert [str(ref) for ref in lineage(History.open(history).paths, "b")] == ["a:0", "b:5"]


@pytest.mark.parametrize("ref", [1.5, None, True, b"1", [1]])
def test_an_invalid_reference_is_refused(tree: History, ref: Any) -> None:
    with pytest.raises(SetupError, match="a checkpoint is named by a step"):
        tree.resolve(ref)


def test_whole_numbers_of_numpy_are_steps(tree: History) -> None:
    assert tree.resolve(np.int64(40)) == CheckpointRef("c", 40)  # type: ignore[arg-type]


def test_the_beginning_of_a_runs_name_is_enough(tmp_path: Path) -> None:
    for day, run in enumerate(["20261121-101502-7f3a9c", "20261122-101502-1b2c3d", "20261122-1"], start=1):
        _run(tmp_path, run, [day], day=day)
    history = History.open(tmp_path)
    assert str(history.resolve("20261121:1")) == "20261121-101502-7f3a9c:1"
    assert str(history.resolve("20261122-10:latest")) == "20261122-101502-1b2c3d:2"
    assert history.run_named("20261122-1") == "20261122-1", "a whole name is itself, whatever begins with it"
    with pytest.raises(NotFoundError, match=r"2 runs of .* begin with '20261122': 20261122-1, 20261122-101502-1b2c3d"):
        history.run_named("20261122")
    with pytest.raises(NotFoundError, match="no run '2027'"):
        history.run_named("2027")
