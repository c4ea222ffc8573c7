"""A compaction that is killed by SIGKILL at any moment leaves whole checkpoints, and the next one goes on."""

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packed_helpers import RUN, all_bytes, compacted, make_history, packed_files_of
from places import SUPPORT

from catalog.history import History
from catalog.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.long]

KILLS = 6
SCRIPT = """
import sys
from pathlib import Path
from catalog.history import History
from catalog.compaction.compact import compact_run
history = History.open(Path(sys.argv[1]))
print("ready", flush=True)
compact_run(history, "run-a", range(60), key_every=3)
print("done", flush=True)
"""


def compaction_of(root: Path) -> subprocess.Popen[str]:
    """Return a new process that begins to compact the history now."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, root], stdout=subprocess.PIPE, text=True, cwd=SUPPORT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def seconds_of_a_compaction(root: Path) -> float:
    """Return how long a compaction takes that nobody kills."""
    process = compaction_of(root)
    began = time.perf_counter()
    assert process.communicate()[0] == "done\n"
    return time.perf_counter() - began


def killed(root: Path, after_s: float) -> bool:
    """Compact in a new process that is killed so long after it was ready; return whether it had not ended by then."""
    process = compaction_of(root)
    assert process.stdout is not None
    time.sleep(after_s)
    process.kill()
    rest = process.stdout.read()
    process.wait()
    return "done" not in rest


@pytest.mark.guards("A checkpoint exists whole or not at all")
def test_a_killed_compaction_loses_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    before = all_bytes(make_history(made, elements=200_000))
    draw = random.Random(5)
    whole_s = seconds_of_a_compaction(shutil.copytree(made, tmp_path / "whole"))
    cut = 0
    for number in range(KILLS):
        root = tmp_path / f"h{number}"
        shutil.copytree(made, root)
        cut += killed(root, draw.uniform(0.0, whole_s))
        history = History.open(root)
        assert all_bytes(history) == before
        assert verify(history) == []
        compacted(history)
        assert len(packed_files_of(history)) == 2 * len(history.steps(RUN))
        assert all_bytes(history) == before
        shutil.rmtree(root)
    assert cut
