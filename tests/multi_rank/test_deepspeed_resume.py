"""A training is captured by one set of processes and resumed by another, of the same size and of the other."""

from pathlib import Path

import pytest
from ranks import case_names, run_ranks

ORIGINAL, AGAIN = "deepspeed_cases_original", "deepspeed_cases_again"
WORLDS = (1, 2)
# The set-up of the first test runs several groups, each with its own time limit.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], str]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    said: dict[tuple[int, str], str] = {}
    for module in (ORIGINAL, AGAIN):
        for world in WORLDS:
            outcomes = run_ranks(module, world=world, folder=folder)
            said.update({(world, case): outcome for case, outcome in outcomes.items()})
    return said


@pytest.mark.guards("Resume is exact")
@pytest.mark.parametrize("world", WORLDS, ids=["1-rank", "2-ranks"])
@pytest.mark.parametrize("case", [*case_names(ORIGINAL), *case_names(AGAIN)])
def test_resume(said: dict[tuple[int, str], str], case: str, world: int) -> None:
    assert said[world, case] == "passed", said[world, case]
