"""Hugging Face's Trainer with DeepSpeed on two ranks."""

from pathlib import Path

import pytest
from ranks import case_names, run_ranks

CASES = "deepspeed_cases_trainer"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("trainer")
    return run_ranks(CASES, world=2, folder=folder)


@pytest.mark.parametrize("case", case_names(CASES))
def test_trainer(said: dict[str, str], case: str) -> None:
    assert said[case] == "passed", said[case]
