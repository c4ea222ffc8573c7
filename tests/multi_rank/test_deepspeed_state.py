"""The DeepSpeed provider in real processes: addressing, restore, refusals. One process group of each size runs all cases."""

from pathlib import Path

import pytest
from ranks import case_names, run_ranks

CASES = "deepspeed_cases_state"


@pytest.fixture(scope="module", params=[1, 2], ids=["1-rank", "2-ranks"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks(CASES, world=request.param, folder=folder)


@pytest.mark.parametrize("case", case_names(CASES))
def test_state(said: dict[str, str], case: str) -> None:
    assert said[case] == "passed", said[case]
