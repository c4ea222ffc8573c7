"""DeepSpeed checkpoints stay correct while they are being written: two ranks, in real processes."""

from pathlib import Path

import pytest
from ranks import case_names, run_ranks

CASES = "deepspeed_cases_saving"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, str]:
    return run_ranks(CASES, world=2, folder=folder)


@pytest.mark.parametrize("case", case_names(CASES))
def test_saving(said: dict[str, str], case: str) -> None:
    assert said[case] == "passed", said[case]


def test_what_was_pending_at_exit_is_a_whole_checkpoint(said: dict[str, str], folder: Path) -> None:
    assert (folder / "left" / "latest").read_text() == "last"
