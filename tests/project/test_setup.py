"""Setup looks for what `make` needs on a machine, and names what it cannot install."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

USED = ("bash", "c++", "cmake", "env", "find", "id", "pkg-config")
"""The script and the build use these programs; apt-get and sudo are not among them."""


@pytest.fixture
def machine(tmp_path):
    """Return a folder with these programs alone, as $PATH."""
    for name in USED:
        (tmp_path / name).symlink_to(shutil.which(name))
    return tmp_path


def look_for(machine: Path, *purpose: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / ".ci" / "system-packages"), sys.executable, *purpose],
        env=os.environ | {"PATH": str(machine)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_build_asks_for_no_browser(machine):
    assert look_for(machine).returncode == 0


def test_a_missing_browser_is_named(machine):
    done = look_for(machine, "browser")
    assert done.returncode == 1
    assert "DSHistory's test in a browser needs: chromium" in done.stderr
    assert "sudo apt-get install chromium" in done.stderr


def test_a_missing_compiler_is_named(machine):
    (machine / "c++").unlink()
    done = look_for(machine)
    assert done.returncode == 1
    assert "DSHistory's build needs: g++" in done.stderr


def test_a_long_command_shows_that_it_is_alive():
    """The command goes on until its input ends, and that ends when the second sign of life has come."""
    command = [str(ROOT / ".ci" / "alive"), "0.01", "waiting", sys.executable, "-c", "input(); raise SystemExit(3)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "waiting\n"
        for _ in range(2):
            assert running.stdout.readline().endswith(" s so far\n")
        running.communicate("\n")
    assert running.returncode == 3
