"""Words become rules, rules become the same words, and every misspelling is refused with the grammar."""

import pytest

from catalog.errors import SetupError
from catalog.retention.policy import Budget, Keep, Policy, policy_of
from catalog.retention.rules import Best, EverySteps, EveryTime, Last, Tagged, Thinned


@pytest.mark.parametrize(
    ("text", "rules", "budget"),
    [
        ("last 20", [Last(20)], None),
        ("every 1000", [EverySteps(1000)], None),
        ("Every 1000 steps", [EverySteps(1000)], None),
        ("every 30m", [EveryTime(1800.0)], None),
        ("every 1.5 hours", [EveryTime(5400.0)], None),
        ("every 2d", [EveryTime(172_800.0)], None),
        ("best 3 by loss", [Best(3, "loss")], None),
        ("best by Eval/F1 max", [Best(1, "Eval/F1", largest=True)], None),
        ("best 2 by loss min", [Best(2, "loss")], None),
        ("one per 1h for 2d", [Thinned(3600.0, 172_800.0)], None),
        ("tagged", [Tagged()], None),
        ("50GB", [], 50 * 10**9),
        ("1.5 TiB", [], 3 * 2**39),
        ("last 20, every 1000, best 3 by loss, 50GB", [Last(20), EverySteps(1000), Best(3, "loss")], 50 * 10**9),
    ],
)
def test_words(text: str, rules: list[object], budget: int | None) -> None:
    policy = policy_of(text)
    assert (list(policy.rules), policy.budget_bytes) == (rules, budget)
    assert policy_of(str(policy)) == policy


def test_rules_and_words_in_one_list() -> None:
    assert policy_of([Last(3), "best 2 by loss", Budget(100)]) == Policy((Last(3), Best(2, "loss")), 100)
    assert policy_of(Last(3)) == policy_of("last 3")


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        ("lst 20", "perhaps 'last' for 'lst'"),
        ("last 0", "1 or more"),
        ("last -3", "is no rule"),
        ("every 0", "1 or more"),
        ("every 10 parsecs", "is no rule"),
        ("best 3 by", "is no rule"),
        ("best 0 by loss", "1 or more"),
        ("best 3 by loss maximum", "is no rule"),
        ("one per 0h for 2d", "above 0"),
        ("50 GBit", "is no rule"),
        ("0GB", "1 or more"),
        ("1GB, 2GB", "has 2 budgets"),
        ("last 3,,", "a comma with nothing beside it"),
        ("", "would remove everything"),
        ([], "would remove everything"),
        (7, "of type int"),
        ([7], "is no rule"),
        ([Last], "is no rule"),
        ("last 3; every 10", "is no rule"),
    ],
)
def test_what_means_nothing_is_refused(keep: Keep, told: str) -> None:
    with pytest.raises(SetupError, match=told):
        policy_of(keep)


@pytest.mark.parametrize("rule", [lambda: Last(True), lambda: EveryTime(float("inf")), lambda: Best(1, "")])
def test_rules_check_themselves(rule: object) -> None:
    with pytest.raises(SetupError, match="keep"):
        rule()  # type: ignore[operator]
