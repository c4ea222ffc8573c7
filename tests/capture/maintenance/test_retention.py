"""A session with a policy removes the rest beside the training, keeps to its budget, and never loses what must stay."""

import contextlib
import json
import math
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from capture_helpers import assert_same, committed_steps, make, one_step, reference
from catalog_helpers import Run, pieces_of
from disk_watcher import watched

import capture
from capture.maintenance import compaction
from capture.maintenance.retention import Retention
from capture.publishing import committer
from capture.redo_log import redo_log
from catalog.access.pins import pinned
from catalog.errors import SetupError, SnapshotError
from catalog.history import History
from catalog.read.redo import recorded_steps
from catalog.records import CheckpointRef
from catalog.retention.facts import FactsReader, bytes_on_disk
from catalog.retention.policy import Budget, policy_of
from catalog.retention.rules import Last
from catalog.verify import verify

WIDTH = 160


def steps_of(history: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int, **options) -> str:
    """Capture every one of `count` steps and return the run; nothing may fail."""
    # Statistics come when there is time, and the newest checkpoint that they prove to be healthy stays too.
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0, **options) as session:
        for _ in range(count):
            one_step(model, optimizer)
            session.wait()
    assert session.failures == []
    return session.run


def test_what_the_policy_does_not_keep_is_removed(history):
    run = steps_of(history, *make(), 12, keep="last 2, every 5")
    assert committed_steps(history, run) == [0, 5, 10, 11, 12]
    opened = History.open(history)
    assert opened.run_facts(run).facts["keep"] == "last 2, every 5"
    assert verify(opened) == []
    removed = opened.query("SELECT step FROM events WHERE name = 'removed' ORDER BY step")["step"].to_pylist()
    assert removed == [1, 2, 3, 4, 6, 7, 8, 9]
    assert not opened.query("SELECT * FROM events WHERE name LIKE '%failed%'").num_rows
    assert [path.name for path in opened.paths.steps_dir(run).iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(("keep", "are_late"), [("last 2", True), ("last 2, 50MB", True), ("last 2, 4MB", False)])
def test_removals_come_later_where_nothing_needs_their_room(history, monkeypatch, keep, are_late):
    monkeypatch.setattr(committer, "_UPKEEP_SHARE", 1e-6)
    model, optimizer = make(WIDTH)
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0, keep=keep) as session:
        for _ in range(8):
            one_step(model, optimizer)
            session.wait()
        assert (len(committed_steps(history, session.run)) == 9) == are_late
    assert session.failures == []
    assert committed_steps(history, session.run) == [7, 8]


def test_a_policy_may_be_rules_and_a_misspelt_one_leaves_nothing_behind(history):
    model, optimizer = make()
    with pytest.raises(SetupError, match="is no rule"):
        capture.enable(model, optimizer=optimizer, history=history, keep="lst 2")
    assert not history.exists()
    assert committed_steps(history, steps_of(history, model, optimizer, 4, keep=Last(1))) == [4]


def test_a_budget_in_which_no_checkpoint_has_room_is_refused_with_both_values(history):
    model, optimizer = make(WIDTH)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(SetupError, match=r"takes at least (\d+) bytes, more than the budget of 100000, ") as refused:
        capture.enable(model, optimizer=optimizer, history=history, keep="last 2, 100kB")
    told = int(str(refused.value).split("at least ")[1].split()[0])
    assert weights <= told < 1.2 * weights
    assert History.open(history).runs() == []


@pytest.mark.guards("A removed checkpoint is removed whole")
def test_what_later_checkpoints_refer_to_stays(history):
    model, optimizer = make(WIDTH)
    model.inner.requires_grad_(False)
    states = {}
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0, keep="last 2") as session:
        for step in range(1, 9):
            one_step(model, optimizer)
            session.wait()
            states[step] = reference(model, optimizer)
    assert session.stats.unchanged_bytes > 0
    left = committed_steps(history, session.run)
    assert left[-2:] == [7, 8]
    assert len(left) == 3
    needs = FactsReader(History.open(history)).line(session.run)[-1].needs
    assert needs == {CheckpointRef(session.run, left[0])}
    for step in left:
        other, others = make(WIDTH, seed=9)
        capture.restore(step, history=history, model=other, optimizer=others)
        if step in states:
            assert_same(reference(other, others), states[step])


@pytest.mark.guards("The newest healthy checkpoint stays")
def test_a_training_that_diverges_keeps_what_it_can_go_back_to(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0, keep="last 2") as session:
        for step in range(1, 9):
            one_step(model, optimizer)
            if step == 4:
                with session.modify(), torch.no_grad():
                    model.outer.weight.fill_(math.nan)
            session.log(loss=math.nan if step >= 4 else 1.0)
            session.wait()
    left = committed_steps(history, session.run)
    # What is NaN everywhere does not change any more, so the last two refer to earlier ones.
    facts = FactsReader(History.open(history)).line(session.run)
    assert set(left) == {3, 7, 8} | {ref.step for one in facts[-2:] for ref in one.needs}
    other, others = make(seed=9)
    capture.restore(3, history=history, model=other, optimizer=others)
    assert all(parameter.isfinite().all() for parameter in other.parameters())


def test_tags_and_what_is_read_stay(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0, keep="last 1") as session:
        for step in range(1, 7):
            one_step(model, optimizer)
            if step == 2:
                session.tag("mine")
            session.wait()
            if step == 4:
                reader = pinned(session._run.paths, CheckpointRef(session.run, 4))
                reader.__enter__()
        assert {2, 4} <= set(committed_steps(history, session.run))
        reader.__exit__(None, None, None)
    assert committed_steps(history, session.run) == [2, 6]


@pytest.mark.guards("A byte budget holds")
def test_the_budget_holds_at_every_step(history, figure):
    model, optimizer = make(WIDTH)
    budget = 4_000_000
    most, captured = 0, set()
    options = {"every": 1, "stats_every": 0, "keep": f"{budget}B"}
    with capture.enable(model, optimizer=optimizer, history=history, **options) as session:
        for _ in range(15):
            one_step(model, optimizer)
            most = max(most, bytes_on_disk(session._run.paths.run_dir(session.run)))
            captured |= set(committed_steps(history, session.run))
        session.wait()
    most = max(most, bytes_on_disk(session._run.paths.run_dir(session.run)))
    assert session.failures == []
    assert captured | set(committed_steps(history, session.run)) >= {13, 14, 15}
    assert most <= budget
    figure("bytes at most, of a budget of 4000000", most)


@pytest.mark.guards("A byte budget holds")
def test_a_snapshot_without_room_is_not_written_and_the_training_goes_on(history):
    model, optimizer = make(WIDTH)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0, keep="1MB") as session:
            losses = [one_step(model, optimizer) for _ in range(4)]
    assert len(losses) == 4
    assert committed_steps(history, session.run) == [0]
    # The last step is tried once more at the end.
    assert [type(failure) for failure in session.failures] == [SnapshotError] * 5
    assert "step 1 is not captured: the budget of keep='1MB' has no room" in str(session.failures[0])
    assert any("has no room" in str(one.message) for one in told)
    assert bytes_on_disk(session._run.paths.run_dir(session.run)) <= 1_000_000


def test_a_training_that_goes_on_is_one_with_what_it_goes_on_from(history):
    first = steps_of(history, *make(), 4, keep="last 2")
    other = steps_of(history, *make(seed=8), 3)
    opened = History.open(history)
    model, optimizer = make(seed=9)
    capture.restore(f"{first}:4", history=history, model=model, optimizer=optimizer)
    assert committed_steps(history, first) == [3, 4]
    second = steps_of(history, model, optimizer, 1, keep="last 2")
    assert opened.run_facts(second).parent_run == first
    assert (committed_steps(history, first), committed_steps(history, second)) == ([], [4, 5])
    assert committed_steps(history, other) == [0, 1, 2, 3]
    capture.restore(f"{second}:5", history=history, model=model, optimizer=optimizer)
    third = steps_of(history, model, optimizer, 2, keep="last 1")
    assert committed_steps(history, second) == [4, 5]
    assert committed_steps(history, third) == [7]
    assert verify(opened) == []


@pytest.fixture
def segments_of_one_step(monkeypatch):
    """So that a short training has many segments; what packs comes to its turn on a busy machine too."""
    monkeypatch.setattr(redo_log, "_SEGMENT_S", 0.0)
    monkeypatch.setattr(compaction, "_START", compaction._START.replace("beside.take_lowest_priority()\n", ""))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def all_done(session: capture.Session) -> None:
    """Wait until the last snapshot is committed, or has failed, and what must go is gone."""
    session._events.current.finalize_objects()
    session._committer.make_room()


@pytest.mark.guards("A byte budget holds")
@pytest.mark.parametrize("keep", ["{}B", "last 2, {}B"])
def test_a_redo_log_keeps_to_the_budget_at_every_moment(history, segments_of_one_step, figure, keep):
    """Checkpoints fill the budget while gradients take little; then these take much, which nobody could foresee."""
    model, optimizer = make(WIDTH)
    budget, states = 7_500_000, {}
    is_small = True
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.sign() if is_small else None)
    options = {"every": 8, "stats_every": 0, "redo": True, "keep": keep.format(budget)}
    with (
        watched(history / "runs") as seen,
        capture.enable(model, optimizer=optimizer, history=history, **options) as session,
    ):
        for step in range(1, 57):
            is_small = step <= 16
            one_step(model, optimizer)
            states[step] = reference(model, optimizer)
            if is_small and step % 8:
                session.snapshot()
            if step % 8 == 0:
                all_done(session)
    assert session.failures == []
    assert budget // 2 < seen.most_bytes <= budget
    figure(f"bytes at most, under keep={options['keep']!r}", seen.most_bytes)
    opened = History.open(history)
    recorded = recorded_steps(opened.paths, session.run)
    assert recorded[0] > 1, "old steps go"
    assert set(range(49, 56)) <= set(recorded), "new ones come"
    assert_same(capture.restore(53, history=history), states[53])
    gone = opened.query("SELECT step, detail->>'reason' AS reason FROM events WHERE name = 'redo_removed'").to_pylist()
    assert gone[0]["step"] == 1
    assert "beyond the budget of 7500000 bytes" in gone[0]["reason"]
    assert verify(opened) == []


@pytest.mark.guards("A byte budget holds")
def test_redo_log_and_packing_keep_to_one_budget_at_every_moment(history, segments_of_one_step, figure):
    model, optimizer = make(WIDTH)
    budget, states = 7_000_000, {}
    options = {"every": 4, "stats_every": 0, "redo": True, "compact": True, "keep": f"{budget}B"}
    with (
        watched(history / "runs") as seen,
        capture.enable(model, optimizer=optimizer, history=history, **options) as session,
    ):
        packing = session._committer._compaction
        # Where the log has taken the room of an image, room is made at the next commit: so the training goes on.
        while session.step < 60 or session.stats.compacted < 3:
            one_step(model, optimizer)
            states[session.step] = reference(model, optimizer)
            if session.step % 4 == 0:
                all_done(session)
            if session.step in (32, 48):
                # What is packed is no newest one, and may be gone again by the end, or before its turn.
                until(
                    lambda: (
                        packing._waits_for_room
                        or session.stats.compacted >= session.step // 16
                        or len(packing._published) + len(packing._committed) <= compaction._NEWEST
                    )
                )
            assert session.step < 1_000
        last, compacted = session.step, session.stats.compacted
    assert session.failures == []
    assert budget // 2 < seen.most_bytes <= budget
    figure(f"bytes at most, of a budget of {budget}", seen.most_bytes)
    figure("checkpoints packed", compacted)
    opened = History.open(history)
    left = committed_steps(history, session.run)
    assert 0 not in left
    for step in left:
        assert_same(capture.restore(step, history=history), states[step])
    before = (last - 1) // 4 * 4
    for step in range(before, last):
        assert_same(capture.restore(step, history=history), states[step])
    assert verify(opened) == []


@pytest.mark.guards("A byte budget holds")
def test_packing_waits_where_the_budget_has_no_room_for_an_image(history, segments_of_one_step):
    """All checkpoints have a tag, so none goes, and there is room for none more: nor for an image beside its file."""
    model, optimizer = make(WIDTH)
    budget = 4_000_000
    options = {"every": 1, "stats_every": 0, "compact": True, "keep": f"{budget}B"}
    with (
        watched(history / "runs") as seen,
        capture.enable(model, optimizer=optimizer, history=history, **options) as session,
    ):
        with contextlib.ExitStack() as readers:
            while not session.failures:
                session.tag(f"at-{session.step}")
                all_done(session)
                readers.enter_context(pinned(session._run.paths, CheckpointRef(session.run, session.step)))
                one_step(model, optimizer)
        packing = session._committer._compaction
        until(lambda: packing._waits_for_room or session.stats.compacted)
    assert budget - 400_000 < seen.most_bytes <= budget
    assert session.stats.compacted == 0
    told = History.open(history).query("SELECT detail->>'reason' AS reason FROM events WHERE name = 'compaction_waits'")
    assert told.num_rows == 1
    assert f"the budget of keep='{Budget(budget)}' has no room for an image of" in told["reason"][0].as_py()


@pytest.mark.guards("A byte budget holds")
def test_a_snapshot_that_a_load_has_counted_back_keeps_its_room_until_it_is_committed(history):
    with Run(history) as run:
        run.checkpoint(0, pieces_of({"w": b"a"}))
        retention = Retention(policy_of("1GB"), run.writers[0])
        retention.upkeep()
        assert retention.admit(12, 300 << 20)
        assert retention.admit(6, 300 << 20), "begun later, with a smaller number"
        assert not retention.admit(7, 600 << 20)
        run.checkpoint(12, pieces_of({"w": b"b"}))
        retention.upkeep()
        assert not retention.admit(7, 900 << 20), "step 6 is still being written"
        run.checkpoint(6, pieces_of({"w": b"c"}))
        retention.upkeep()
        assert retention.admit(7, 900 << 20)


@pytest.mark.guards("The training goes on")
@pytest.mark.parametrize("stage", ["redo_told", "admit", "redo_grants"])
def test_an_interrupt_while_room_is_shared_leaves_no_log_waiting(history, monkeypatch, stage):
    """Else the log would wait for a grant that never comes, and the training for the log."""
    model, optimizer = make()
    options = {"every": 4, "stats_every": 0, "redo": True, "keep": "100MB"}

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with capture.enable(model, optimizer=optimizer, history=history, **options) as session:
        room = session._events._redo.room
        for _ in range(3):
            one_step(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(Retention, stage, interrupted)
            with pytest.raises(KeyboardInterrupt):
                one_step(model, optimizer)
        holding = threading.Thread(target=room.hold, args=(1 << 40,))
        holding.start()
        holding.join(20)
        try:
            assert not holding.is_alive()
        finally:
            room.grant(0)
            holding.join()
        for _ in range(8):
            one_step(model, optimizer)
    assert committed_steps(history, session.run)[-2:] == [8, 12]
    assert {9, 10, 11} <= set(recorded_steps(session._run.paths, session.run)), "the log goes on"


def is_about_redo(warning: warnings.WarningMessage) -> bool:
    return "is not in the redo log" in str(warning.message)


@pytest.mark.guards("A byte budget holds")
@pytest.mark.guards("The training goes on")
def test_redo_steps_without_room_are_left_out_by_name_until_there_is_room(history, segments_of_one_step):
    """Tags hold checkpoints until a step has no room; when the names are given to the newest one, the others go."""
    model, optimizer = make(WIDTH)
    budget, tags = 6_200_000, 0
    options = {"every": 8, "stats_every": 0, "redo": True, "keep": f"{budget}B"}
    losses, made = [], 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with capture.enable(model, optimizer=optimizer, history=history, **options) as session:
            with watched(history / "runs") as seen:
                while session.step < 120 and not any(map(is_about_redo, told)):
                    losses.append(one_step(model, optimizer))
                    if session.step % 8 == 0:
                        session.tag(f"tag-{tags}")
                        tags += 1
                        all_done(session)
                full_at = session.step
                losses += [one_step(model, optimizer) for _ in range(16)]
            assert seen.most_bytes <= budget
            for tag in range(tags):
                session.tag(f"tag-{tag}", committed_steps(history, session.run)[-1])
            with watched(history / "runs") as seen:
                while session.step < full_at + 57:
                    before = reference(model, optimizer)
                    losses.append(one_step(model, optimizer))
                    if session.step % 8 == 0:
                        all_done(session)
                        steps = range(session.step - 7, session.step)
                        if set(steps) <= set(recorded_steps(session._run.paths, session.run)):
                            assert_same(capture.restore(steps[-1], history=history), before)
                            made += 1
            assert seen.most_bytes <= budget
    alone = make(WIDTH)
    assert losses == [one_step(*alone) for _ in losses]
    assert_same(reference(model, optimizer), reference(*alone))
    loud = [str(one.message) for one in told if is_about_redo(one)]
    opened = History.open(history)
    recorded = recorded_steps(opened.paths, session.run)
    rows = opened.query("SELECT step, detail FROM events WHERE name = 'redo_left_out' ORDER BY step").to_pylist()
    named = {step for row in rows for step in range(row["step"], json.loads(row["detail"])["last"] + 1)}
    assert len(loud) == 1
    assert f"step {min(named)} is not in the redo log: the byte budget of keep= has no room" in loud[0]
    # It is told in the background, maybe a step later.
    assert full_at - 8 < min(named) <= full_at < 120
    assert not named & set(recorded)
    assert made > 0, "the log goes on"
    assert verify(opened) == []
