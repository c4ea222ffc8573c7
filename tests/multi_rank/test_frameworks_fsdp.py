"""FSDP2 is captured over gloo: most cases on two ranks, then on one rank and without a process group on their
histories.
"""

from pathlib import Path

import pytest
import torch
from capture_helpers import assert_same
from frameworks_helpers import plain, restored, train, whole_state
from ranks import case_names, run_ranks

TWO, ONE = "frameworks_cases_fsdp", "frameworks_cases_one"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def on_two(folder: Path) -> dict[str, str]:
    return run_ranks(TWO, world=2, folder=folder)


@pytest.fixture(scope="module")
def on_one(on_two: dict[str, str], folder: Path) -> dict[str, str]:
    return run_ranks(ONE, world=1, folder=folder)


@pytest.mark.parametrize("case", case_names(TWO))
def test_two_ranks(on_two: dict[str, str], case: str) -> None:
    assert on_two[case] == "passed", on_two[case]


@pytest.mark.parametrize("case", case_names(ONE))
def test_one_rank(on_one: dict[str, str], case: str) -> None:
    assert on_one[case] == "passed", on_one[case]


def test_two_ranks_into_a_plain_model_of_one_process(on_two: dict[str, str], folder: Path) -> None:
    training = restored(plain(3), 2, folder / "fsdp")
    assert_same(whole_state(training[0], training[1]), torch.load(folder / "expected.pt", weights_only=True))
    train(training, 1, start=2)
