"""`make test-sanitize`: the native code under the sanitizers, in its C++ tests and behind the Python extension.

The C++ tests run with AddressSanitizer and UndefinedBehaviorSanitizer, and with ThreadSanitizer. The extension is built
with the first two into a copy of the package `native`, and every test of the extension's functions runs with it, and so
do the Python processes that tests start. ThreadSanitizer needs an interpreter that is built with it, so there it stays
with the C++ tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from places import ROOT

__all__ = ["FORKING", "NOT_SANITIZED", "native_tests", "sanitized_extension", "sanitized_tests"]

FLAGS = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
COMPILER = os.environ.get("CXX", "c++")
SITECUSTOMIZE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""
"""An editable install finds the tree's own packages wherever else they are looked for first; here it must not. Python
runs a module of the name `sitecustomize` at its start, in the processes that tests start too."""

NOT_SANITIZED = {
    "cpp": "builds the C++ tests with sanitizers itself",
    "rooms": "reads sources only",
    "stub": "reads the stub of the tree",
}
"""The tests of `native` that do not run with the sanitized extension, and why."""

FORKING = (
    "test_feed.py::test_a_forked_child_leaves_the_parents_slots_alone",
    "test_lifetime.py::test_a_forked_child_gets_errors_and_leaves_the_parents_file",
    "test_lifetime.py::test_a_forked_child_exits_without_hang",
    "test_lifetime.py::test_a_forked_child_does_not_have_the_budget",
)
"""The tests that fork while native threads are at work do not run with it either. The allocator of AddressSanitizer
before LLVM 17, which is GCC 12's too, takes a lock that another thread holds into the child, where nobody frees it."""


def sanitized_extension(folder: Path) -> Path:
    """Build the extension with the sanitizers; return the folder whose package `native` has it."""
    build, place = folder / "build", folder / "place"
    nanobind = _said([sys.executable, "-m", "nanobind", "--cmake_dir"])
    configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=None"]
    configure += [f"-DCMAKE_CXX_FLAGS={FLAGS}", f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind}"]
    for command in (configure, ["ninja", "-C", build, "_core"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    package = place / "native"
    package.mkdir(parents=True)
    for source in (ROOT / "native").glob("*.py*"):
        (package / source.name).write_bytes(source.read_bytes())
    (built,) = (build / "native").glob("_core*.so")
    (package / built.name).write_bytes(built.read_bytes())
    # The layers above refuse a `native` that does not lie beside them.
    for layer in ("catalog", "capture", "dshistory"):
        shutil.copytree(ROOT / layer, place / layer)
    (place / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return place


def sanitized_tests(place: Path, tests: list[str]) -> int:
    """Run tests with the extension in `place`; return pytest's exit status."""
    runtimes = [_said([COMPILER, f"-print-file-name={name}"]) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]),
        # The tree's own `native`, in the working folder, must not come first.
        "PYTHONSAFEPATH": "1",
        # The interpreter keeps memory until its end; the C++ tests look for leaks.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "DSHISTORY_SANITIZED": str(place),
    }
    left_out = [f"--deselect=tests/native/{name}" for name in FORKING]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *left_out, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def native_tests() -> list[str]:
    """Return the tests that run with the sanitized extension: a new one is among them until it is left out by name."""
    left_out = {f"test_{name}.py" for name in NOT_SANITIZED}
    found = sorted((ROOT / "tests" / "native").glob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if path.name not in left_out]


def _said(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rs", "tests/native/test_cpp.py"]
    failed = subprocess.run(pytest, cwd=ROOT, check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        place = sanitized_extension(Path(folder))
        return sanitized_tests(place, ["tests/proofs/sanitize/test_sanitize.py", *native_tests()]) or failed


if __name__ == "__main__":
    sys.exit(main())
