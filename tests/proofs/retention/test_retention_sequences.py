"""A sample of the random lives of a history that `make prove-retention` runs by the ten thousand."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from places import ROOT
from retention_sequences import Sequences, counts


@pytest.mark.guards("A removed checkpoint is removed whole")
@pytest.mark.guards("The newest healthy checkpoint stays")
@pytest.mark.guards("A packed checkpoint is the checkpoint")
@pytest.mark.slow
def test_nothing_kept_is_lost(figure: Callable[[str, float], None]) -> None:
    run_state_machine_as_test(
        Sequences,
        settings=settings(
            max_examples=15,
            stateful_step_count=10,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert counts["checkpoints removed"] > 0
    assert counts["checkpoints packed"] > 0
    figure("sequences", counts["sequences"])
    figure("restores compared", counts["restores"])


@pytest.mark.slow
@pytest.mark.long
def test_ctrl_c_ends_the_proof_with_the_sum_of_the_lives_so_far(tmp_path: Path) -> None:
    paths = os.pathsep.join(str(ROOT / "tests" / name) for name in ("proofs", "support"))
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("prove_retention.py"))]
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as proof:
        # Each life has a folder of its own: the second one is there once the first has ended.
        lives = set[Path]()
        while len(lives) < 2:
            lives |= set(tmp_path.glob("dshistory-retention-*"))
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"ended by itself with {proof.wait(0.05)}")
        proof.send_signal(signal.SIGINT)
        said, _ = proof.communicate()
    assert proof.returncode == 130
    assert "\ninterrupted\n" in f"\n{said}"
    assert int(re.search(r"^([0-9,]+) sequences: nothing kept was lost", said, re.MULTILINE)[1]) >= 1
