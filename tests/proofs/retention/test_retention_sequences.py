"""A sample of the random lives of a history that `make prove-retention` runs by the ten thousand."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from retention_sequences import Sequences, counts


@pytest.mark.guards("A removed checkpoint is removed whole")
@pytest.mark.guards("The newest healthy checkpoint stays")
@pytest.mark.slow
def test_nothing_kept_is_lost(figure: Callable[[str, float], None]) -> None:
    run_state_machine_as_test(
        Sequences,
        settings=settings(
            max_examples=15,
            stateful_step_count=10,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert counts["checkpoints removed"] > 0
    figure("sequences", counts["sequences"])
    figure("restores compared", counts["restores"])
