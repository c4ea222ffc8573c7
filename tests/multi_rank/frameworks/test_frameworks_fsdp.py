"""FSDP2 is captured over gloo: most cases on two ranks, then on one rank and without a process group on their
histories.
"""

from pathlib import Path

import pytest
import torch
from capture_helpers import assert_same
from frameworks_helpers import plain, restored, train, whole_state
from ranks import groups_as_tests

# The set-up of the first test runs both groups, each with its own time limit.
pytestmark = pytest.mark.timeout(1200)

folder, said, test_fsdp = groups_as_tests(("frameworks_cases_fsdp", 2), ("frameworks_cases_one", 1))


@pytest.mark.usefixtures("said")
def test_two_ranks_into_a_plain_model_of_one_process(folder: Path) -> None:
    training = restored(plain(3), 2, folder / "fsdp")
    assert_same(whole_state(training[0], training[1]), torch.load(folder / "expected.pt", weights_only=True))
    train(training, 1, start=2)
