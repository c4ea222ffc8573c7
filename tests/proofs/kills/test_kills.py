"""Two ranks of a real training, killed, leave a history that has lost nothing: a sample of `make prove-kills`."""

from collections.abc import Callable

import pytest
from kills import Kill, killer

# Two steps may have ended within the second after which a rank is killed.
ENDLESS = 1_000_000


@pytest.mark.guards("A checkpoint exists whole or not at all")
@pytest.mark.slow
@pytest.mark.long
def test_kills_at_some_calls_and_times(figure: Callable[[str, float], None]) -> None:
    with killer() as rounds:
        for kill in (Kill(call=23), Kill(rank=1, call=90), Kill(seconds=1.0, steps=ENDLESS)):
            problems, _ = rounds.round(kill)
            assert not problems
        assert not rounds.finish()
        assert rounds.kills >= 3
        figure("processes killed", rounds.kills)
