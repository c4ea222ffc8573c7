"""Checkpoints are exported to DeepSpeed and imported from it, with DeepSpeed itself on the other side."""

from pathlib import Path

import pytest
from ranks import case_names, run_ranks

MODULES = ("deepspeed_cases_export", "deepspeed_cases_import")
WORLDS = (1, 2)
# The set-up of the first test runs several groups, each with its own time limit.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], str]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return {
        (world, case): outcome
        for module in MODULES
        for world in WORLDS
        for case, outcome in run_ranks(module, world=world, folder=folder).items()
    }


@pytest.mark.parametrize("world", WORLDS, ids=["1-rank", "2-ranks"])
@pytest.mark.parametrize("case", [case for module in MODULES for case in case_names(module)])
def test_deepspeed(said: dict[tuple[int, str], str], case: str, world: int) -> None:
    assert said[world, case] == "passed", said[world, case]
