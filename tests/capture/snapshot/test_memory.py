"""A capture takes its budget, 128 MiB, and 12 KiB for each tensor, and holds nothing that the training has let go."""

import json
import subprocess
import sys
from pathlib import Path

import memory_training
import pytest
from memory_training import BUDGET, MIB

pytestmark = pytest.mark.slow

PROMISED_BYTES = 128 * MIB
PROMISED_BYTES_PER_TENSOR = 12 << 10
LEFT_BYTES_PER_TENSOR = 4 << 10
"""After the session is closed."""


def measured(case: str, history: Path) -> dict[str, int]:
    """Return the figures of a training in a process of its own."""
    command = [sys.executable, memory_training.__file__, case, str(history)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, int] = json.loads(done.stdout)
    return figures


@pytest.mark.guards("Memory stays within the budget")
@pytest.mark.parametrize("case", ["small", "average", "warm_up"])
def test_a_capture_takes_what_is_promised(case, history):
    """Many small tensors; an average larger than the budget; weights that change after all."""
    figures = measured(case, history)
    promised = BUDGET + PROMISED_BYTES + PROMISED_BYTES_PER_TENSOR * figures.get("tensors", 0)
    assert figures["snapshots"] > 2
    assert figures["added"] <= promised, f"{figures['added'] / MIB:.0f} MiB, promised are {promised / MIB:.0f}"

    left = PROMISED_BYTES + LEFT_BYTES_PER_TENSOR * figures.get("tensors", 0)
    assert figures["left"] <= left, f"{figures['left'] / MIB:.0f} MiB are left, at most {left / MIB:.0f} should be"


@pytest.mark.guards("Memory stays within the budget")
def test_what_the_training_lets_go_is_free_while_the_session_is_open(history):
    """Gradients, weights and momentum: 384 MiB, of which each one that is held would be 128 MiB."""
    assert measured("let_go", history)["freed"] >= 350 * MIB


@pytest.mark.guards("Memory stays within the budget")
def test_a_checkpoint_leaves_nothing_behind(history):
    """The rows of a tiny model's checkpoint took 65 KB each."""
    assert measured("many", history)["grown"] <= 1024
