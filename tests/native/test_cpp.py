"""The C++ tests pass when built with the sanitizers for races, memory errors and undefined behaviour."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.slow

COMPILER = os.environ.get("CXX", "c++")


def links(sanitizer: str, folder: Path) -> bool:
    """Return True when the toolchain builds a program with the sanitizer, and the program runs."""
    (folder / "probe.cpp").write_text("int main() {}", encoding="utf-8")
    compile_ = [COMPILER, f"-fsanitize={sanitizer}", "probe.cpp", "-o", "probe"]
    return (
        subprocess.run(compile_, cwd=folder, check=False, capture_output=True).returncode == 0
        and subprocess.run([folder / "probe"], check=False, capture_output=True).returncode == 0
    )


@pytest.mark.parametrize(
    "sanitizer",
    [
        pytest.param("thread", marks=pytest.mark.exhaustive),
        pytest.param("address,undefined", marks=pytest.mark.long),
    ],
)
def test_the_core_is_clean_under_sanitizers(tmp_path: Path, sanitizer: str) -> None:
    missing = [tool for tool in ("cmake", "ninja", "pkg-config", COMPILER) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    if not links(sanitizer, tmp_path):
        pytest.skip(f"{COMPILER} has no -fsanitize={sanitizer} here")
    build = tmp_path / "build"
    configure = [
        *("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DDSHISTORY_NATIVE_TESTS=ON", "-DCMAKE_BUILD_TYPE=None"),
        f"-DCMAKE_CXX_FLAGS=-O1 -g1 -fsanitize={sanitizer} -fno-sanitize-recover=all",
    ]
    # As CONTRIBUTING.md says it.
    test = ["ctest", "--test-dir", build, "--verbose"]
    for command in (configure, ["ninja", "-C", build], test):
        run = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert run.returncode == 0, run.stdout[-6000:]
    assert "ok      the_barrier_waits_for_what_the_device_still_reads" in run.stdout
