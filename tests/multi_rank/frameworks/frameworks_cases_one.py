"""Cases for FSDP2 on one rank, run after those on two: the history of another world size, and one from this rank."""

from pathlib import Path

import torch
from capture_helpers import assert_same
from frameworks_cases_fsdp import fsdp
from frameworks_helpers import goes_on_exactly, restored, train, whole_state
from ranks import covers


@covers("FSDP2 of two ranks into one rank")
def case_two_ranks_into_one(folder: Path) -> None:
    model, optimizer, scheduler = restored(fsdp(3), 2, folder / "fsdp")
    assert_same(whole_state(model, optimizer), torch.load(folder / "expected.pt", weights_only=True))
    train((model, optimizer, scheduler), 1, start=2)


def case_alone(folder: Path) -> None:
    goes_on_exactly(fsdp, folder / "alone")
