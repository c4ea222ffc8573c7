"""A short version of the demo restores two DeepSpeed ranks bit for bit in new processes, and can be interrupted."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from places import ROOT
from project_helpers import run_python

DEMO = str(ROOT / "examples" / "demo.py")

pytestmark = pytest.mark.exhaustive


def test_the_demo_ends_with_a_bit_identical_training_and_a_notebook(tmp_path):
    said = run_python(DEMO, "--steps", "12", "--every", "3", "--output", str(tmp_path / "out"), cwd=tmp_path)
    assert "losses of steps 7 to 12: bit-identical" in said
    assert "master weights, Adam moments): bit-identical" in said
    assert "stall" in said
    assert (tmp_path / "out" / "quickstart.html").exists()
    assert (tmp_path / "out" / "quickstart.ipynb").exists()


def test_an_interrupted_demo_leaves_no_process_behind(tmp_path):
    command = [sys.executable, DEMO, "--steps", "100000", "--every", "50000", "--output", str(tmp_path / "out")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as demo:
        for line in demo.stdout:
            if "tokens/s" in line:
                break
        family = psutil.Process(demo.pid).children(recursive=True)
        assert len(family) >= 2
        demo.send_signal(signal.SIGINT)
        demo.stdout.read()
        assert demo.wait(60) == 130
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
