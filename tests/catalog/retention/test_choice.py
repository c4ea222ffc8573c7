"""What stays is decided from facts alone: rules, what must stay, what that needs, and the budget."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from catalog.errors import SetupError
from catalog.format.redo_segment import RedoSegmentName
from catalog.records import CheckpointRef
from catalog.retention.choice import choose, in_the_way
from catalog.retention.facts import CheckpointFacts
from catalog.retention.policy import policy_of
from catalog.retention.redo_segments import SegmentFacts

HOUR = 3600.0


def line(*steps: int, run: str = "r", **changed: dict[int, Any]) -> list[CheckpointFacts]:
    """Return checkpoints of 100 bytes, one each minute; `changed` has a field's value by step."""
    made = []
    for step in steps:
        values = {name: by_step[step] for name, by_step in changed.items() if step in by_step}
        facts = {"created_s": 60.0 * step, "nbytes": 100, "healthy": True, **values}
        facts["needs"] = frozenset(CheckpointRef(run, other) for other in facts.get("needs", ()))
        made.append(CheckpointFacts(CheckpointRef(run, step), **facts))
    return made


def kept(*lines: Sequence[CheckpointFacts], keep: str, more_bytes: int = 0) -> list[int]:
    choice = choose(lines, policy_of(keep), more_bytes=more_bytes)
    assert choice.kept.keys() | choice.removed.keys() == {one.ref for line in lines for one in line}
    assert not choice.kept.keys() & choice.removed.keys()
    return [ref.step for ref in sorted(choice.kept)]


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        ("last 2", [8, 9]),
        ("every 4", [0, 4, 8, 9]),
        ("every 5m", [0, 5, 9]),
        ("best 2 by loss", [3, 4, 9]),
        ("best 2 by loss max", [0, 1, 9]),
        ("last 1, every 5", [0, 5, 9]),
        ("one per 2m for 5m", [4, 6, 8, 9]),
        ("250B", [8, 9]),
        ("every 4, 350B", [4, 8, 9]),
        ("last 3, every 4, 400B", [4, 7, 8, 9]),
        ("every 4, last 3, 400B", [0, 4, 8, 9]),
        ("best 2 by loss, last 2, 200B", [3, 9]),
    ],
)
def test_rules(keep: str, steps: list[int]) -> None:
    """The last rule gives way to a budget first, and of a rule what is worth least."""
    losses = {step: {"loss": abs(step - 3.4)} for step in range(10)}
    losses[0], losses[1] = {"loss": 9.0}, {"loss": 8.0}
    assert kept(line(*range(10), metrics=losses), keep=keep) == steps


@pytest.mark.guards("The newest healthy checkpoint stays")
def test_keep_last_three_that_ran_over_a_nan() -> None:
    bad = {step: False for step in range(5, 10)}
    assert kept(line(*range(10), healthy=bad), keep="last 3") == [4, 7, 8, 9]
    assert kept(line(*range(10), healthy=bad), keep="last 3, 200B") == [4, 9]
    # Statistics come later than their checkpoints, so the newest may turn out to be bad.
    late = {**bad, 8: None, 9: None}
    assert kept(line(*range(10), healthy=late), keep="last 1") == [4, 9]
    assert kept(line(*range(10), healthy=dict.fromkeys(range(10), False)), keep="last 1") == [9]


def test_a_value_that_is_not_finite_is_never_the_best() -> None:
    metrics = {0: {"loss": 3.0}, 1: {"loss": math.nan}, 2: {"loss": -math.inf}, 3: {"loss": 1.0}, 4: {}}
    assert kept(line(*range(5), metrics=metrics, healthy={3: False}), keep="best 1 by loss") == [0, 4]


def test_what_must_stay_needs_no_rule() -> None:
    marks: dict[str, dict[int, Any]] = {
        "tags": {1: ("mine",)},
        "child": {2: "run c goes on from it"},
        "is_read": {3: True},
        "damage": {4: "needs a file"},
    }
    choice = choose([line(*range(8), **marks)], policy_of("last 1"))
    assert {ref.step: reason for ref, reason in choice.kept.items()} == {
        1: "tagged mine",
        2: "run c goes on from it",
        3: "a reader has it open",
        4: "damaged, and left to you: it needs a file",
        7: "the newest",
    }
    assert set(choice.removed.values()) == {"no rule of 'last 1' keeps it"}


def test_what_is_referred_to_stays_as_long_as_that_is_so() -> None:
    needs = {2: [1], 5: [1], 9: [2]}
    choice = choose([line(*range(10), needs=needs)], policy_of("last 1"))
    assert {ref.step: reason for ref, reason in choice.kept.items()} == {
        1: "r:2 refers to its bytes",
        2: "r:9 refers to its bytes",
        9: "the newest",
    }
    assert kept(line(*range(10), needs={8: [1]}), keep="last 2, 200B") == [9]
    assert kept(line(*range(10), needs={8: [1], 9: [1]}), keep="last 2, 200B") == [1, 9]


def test_a_damaged_checkpoint_counts_for_no_rule() -> None:
    assert kept(line(*range(5), damage={3: "needs a file"}), keep="last 2") == [2, 3, 4]


def test_a_budget_that_can_not_be_met_is_refused_with_what_stays() -> None:
    with pytest.raises(SetupError, match=r"200 bytes, and 50 bytes are needed .* r:0 \(tagged a\), r:9 \(the newest\)"):
        choose([line(*range(10), tags={0: ("a",)})], policy_of("220B"), more_bytes=50)


def test_a_budget_holds_for_all_runs_together_and_the_oldest_give_way() -> None:
    lines = [line(0, 1, 2, run="a"), line(3, 4, run="b")]
    assert kept(*lines, keep="last 2, 300B") == [2, 3, 4]
    assert kept(*lines, keep="500B") == [0, 1, 2, 3, 4]


def test_rules_that_keep_nothing_are_told() -> None:
    assert choose([line(1, 2)], policy_of("last 1, tagged, best 1 by loss")).unmet == ("tagged", "best 1 by loss")


def test_who_removes_by_name_is_told_what_is_in_the_way() -> None:
    facts = line(*range(6), needs={5: [1]}, tags={2: ("a",)}, child={3: "run c goes on from it"}, is_read={4: True})
    refs = [one.ref for one in facts]
    found = in_the_way([facts], refs[1:5], force=False)
    assert {ref.step: reason.split(":")[0] for ref, reason in found.items()} == {
        1: "r",
        2: "tagged a",
        3: "run c goes on from it",
        4: "a reader has it open",
    }
    assert {ref.step for ref in in_the_way([facts], refs[1:5], force=True)} == {1, 4}
    assert {
        ref.step for ref in in_the_way([line(1, 2)], [CheckpointRef("r", 1), CheckpointRef("r", 2)], force=False)
    } == {2}


@st.composite
def histories(draw: st.DrawFn) -> list[CheckpointFacts]:
    steps = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=12)))
    made = []
    for step in steps:
        earlier = [other for other in steps if other < step]
        needs = draw(st.sets(st.sampled_from(earlier), max_size=2)) if earlier else ()
        made += line(
            step,
            needs={step: needs},
            healthy={step: draw(st.sampled_from([True, True, False, None]))},
            damage={step: draw(st.sampled_from(["", "", "", "needs a file"]))},
            tags={step: draw(st.sampled_from([(), (), ("t",)]))},
            is_read={step: draw(st.sampled_from([False, False, True]))},
            metrics={step: {"loss": draw(st.floats(0, 9))}},
            nbytes={step: draw(st.integers(1, 100))},
        )
    return made


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine draws slowly
@given(
    histories(), st.sampled_from(["last 2", "every 7", "best 2 by loss", "last 1, every 10", "200B", "last 3, 150B"])
)
def test_whatever_is_kept_has_its_bytes_and_deciding_again_changes_nothing(
    facts: list[CheckpointFacts], keep: str
) -> None:
    policy = policy_of(keep)
    by_ref = {one.ref: one for one in facts}
    try:
        choice = choose([facts], policy)
    except SetupError:
        assert policy.budget_bytes is not None
        return
    assert all(by_ref[ref].needs <= choice.kept.keys() for ref in choice.kept)
    healthy = [one for one in facts if not one.damage and one.healthy is not False]
    assert not healthy or healthy[-1].ref in choice.kept
    assert all(one.ref in choice.kept for one in facts if one.tags or one.is_read or one.damage)
    if policy.budget_bytes is not None:
        assert sum(by_ref[ref].nbytes for ref in choice.kept) <= policy.budget_bytes
    left = [one for one in facts if one.ref in choice.kept]
    assert choose([left], policy).removed == {}


def segment(first: int, last: int, nbytes: int = 100, *, rank: int = 0) -> SegmentFacts:
    return SegmentFacts("r", RedoSegmentName(rank, first, last), nbytes)


LOG = [segment(step + 1, step + 5) for step in range(0, 20, 5)]
"""The steps behind each of the checkpoints 0, 5, 10 and 15."""


@pytest.mark.parametrize(
    ("keep", "coming", "steps", "gone"),
    [
        ("1000B", 0, [0, 5, 10, 15], []),
        ("750B", 0, [0, 5, 10, 15], [1]),
        ("700B", 0, [0, 5, 10, 15], [1]),
        ("650B", 0, [5, 10, 15], [1]),
        ("599B", 0, [5, 10, 15], [1, 6]),
        ("250B", 0, [15], [1, 6, 11]),
        ("150B", 0, [15], [1, 6, 11, 16]),
        # What may come gives way to what is there from the newest checkpoint on.
        ("800B", 100, [0, 5, 10, 15], [1]),
        ("250B", 100, [15], [1, 6, 11]),
        # Where there are rules, what they keep is worth more than any redo step.
        ("last 4, 750B", 0, [0, 5, 10, 15], [1]),
        ("last 4, 450B", 0, [0, 5, 10, 15], [1, 6, 11, 16]),
        ("last 4, 350B", 0, [5, 10, 15], [1, 6, 11, 16]),
        # The steps behind those that no rule keeps are made from the one before them.
        ("every 15, 600B", 0, [0, 15], []),
        ("every 15, 599B", 0, [0, 15], [1, 6, 11]),
        # Without a budget only that goes that nothing can be made from.
        ("last 1", 0, [15], [1, 6, 11]),
    ],
)
def test_redo_steps_give_way_with_the_checkpoints_that_they_need(
    keep: str, coming: int, steps: list[int], gone: list[int]
) -> None:
    choice = choose([line(0, 5, 10, 15)], policy_of(keep), redo=LOG, coming_redo_bytes=coming)
    assert [ref.step for ref in sorted(choice.kept)] == steps
    assert sorted(one.name.first for one in choice.redo) == gone


def test_no_checkpoint_goes_before_the_steps_that_are_made_from_it() -> None:
    log = [segment(6, 10), segment(11, 11)]
    choice = choose([line(0, 5, 10, 11, tags={0: ("a",)})], policy_of("650B"), redo=log, coming_redo_bytes=200)
    assert [ref.step for ref in sorted(choice.kept)] == [0, 10, 11]
    assert choice.redo == (log[0],)


def test_segments_with_steps_in_common_stay_or_go_together() -> None:
    """The later one says which steps of the earlier one do not count any more."""
    log = [segment(1, 4), segment(5, 9), segment(6, 7, 10), segment(8, 9, 10), segment(10, 12)]
    facts = line(0, 4, 6, 8, 9)
    for budget in range(450, 900, 10):
        gone = {one.name.first for one in choose([facts], policy_of(f"last 5, {budget + 100}B"), redo=log).redo}
        assert len(gone & {5, 6, 8}) in (0, 3), budget
    assert {one.name.first for one in choose([facts], policy_of("last 5, 510B"), redo=log).redo} == {1, 5, 6, 8, 10}
    read = line(0, 4, 6, 8, 9, is_read={6: True})
    assert {one.name.first for one in choose([read], policy_of("last 5, 620B"), redo=log).redo} == {1, 10}


def test_steps_behind_a_first_checkpoint_that_is_on_its_way_stay() -> None:
    assert choose([], policy_of("5000B"), redo=LOG).redo == ()
    assert [one.name.first for one in choose([line(10)], policy_of("5000B"), redo=LOG).redo] == [1, 6]


def test_redo_steps_that_a_reader_may_read_stay() -> None:
    facts = line(0, 5, 10, 15, is_read={5: True})
    over = segment(9, 12, rank=1)
    choice = choose([facts], policy_of("500B"), redo=[*LOG, over])
    assert [one.name.first for one in choice.redo] == [1, 16]
    assert [ref.step for ref in sorted(choice.kept)] == [5, 15]
    with pytest.raises(SetupError, match="bytes are needed beside them"):
        choose([facts], policy_of("450B"), redo=[*LOG, over])
