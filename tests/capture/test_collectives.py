"""What ranks know of each other without asking; what they say to each other is tried in tests/multi_rank."""

import pytest

from capture.collectives import processes_here


def test_the_launcher_says_how_many_ranks_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert processes_here(16) == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert processes_here(16) == 8
    assert processes_here(1) == 1
