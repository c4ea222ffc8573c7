"""Hugging Face's Trainer and Accelerate on two ranks over gloo, started once for all cases."""

from pathlib import Path

import pytest
from ranks import case_names, run_ranks

CASES = "frameworks_cases_huggingface"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("huggingface")
    return run_ranks(CASES, world=2, folder=folder)


@pytest.mark.parametrize("case", case_names(CASES))
def test_huggingface(said: dict[str, str], case: str) -> None:
    assert said[case] == "passed", said[case]
