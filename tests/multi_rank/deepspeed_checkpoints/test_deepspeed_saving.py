"""DeepSpeed checkpoints stay correct while they are being written: two ranks, in real processes."""

from pathlib import Path

import pytest
from ranks import groups_as_tests

folder, said, test_saving = groups_as_tests(("deepspeed_cases_saving", 2))


@pytest.mark.usefixtures("said")
def test_what_was_pending_at_exit_is_a_whole_checkpoint(folder: Path) -> None:
    assert (folder / "left" / "latest").read_text() == "last"
