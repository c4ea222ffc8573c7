"""A session with a policy removes the rest beside the training, keeps to its budget, and never loses what must stay."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from capture_helpers import assert_same, committed_steps, make, one_step, reference

import capture
from catalog.errors import SetupError, SnapshotError
from catalog.history import History
from catalog.read.pins import pinned
from catalog.records import CheckpointRef
from catalog.retention.facts import FactsReader, bytes_on_disk
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


def test_a_policy_may_be_rules_and_a_misspelt_one_leaves_nothing_behind(history):
    model, optimizer = make()
    with pytest.raises(SetupError, match="is no rule"):
        capture.enable(model, optimizer=optimizer, history=history, keep="lst 2")
    assert not history.exists()
    assert committed_steps(history, steps_of(history, model, optimizer, 4, keep=Last(1))) == [4]


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
