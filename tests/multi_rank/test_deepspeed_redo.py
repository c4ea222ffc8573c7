"""Redo logs of DeepSpeed engines on two ranks, and then on one that goes on from theirs."""

from pathlib import Path

import pytest
from ranks import case_names, run_ranks

TWO, ALONE = "deepspeed_cases_redo", "deepspeed_cases_redo_alone"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def of_two(folder: Path) -> dict[str, str]:
    return run_ranks(TWO, world=2, folder=folder)


@pytest.fixture(scope="module")
def of_one(of_two: dict[str, str], folder: Path) -> dict[str, str]:
    return run_ranks(ALONE, world=1, folder=folder)


@pytest.mark.parametrize("case", case_names(TWO))
def test_two_ranks(of_two: dict[str, str], case: str) -> None:
    assert of_two[case] == "passed", of_two[case]


@pytest.mark.parametrize("case", case_names(ALONE))
def test_one_rank(of_one: dict[str, str], case: str) -> None:
    assert of_one[case] == "passed", of_one[case]
