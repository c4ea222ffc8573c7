"""Compiles the library that fails calls, once in each process that needs it; `LD_PRELOAD` puts it into a program."""

import functools
import os
import subprocess
import tempfile
from pathlib import Path

__all__ = ["fault_library"]


@functools.cache
def fault_library() -> Path:
    """Return the compiled library."""
    library = Path(tempfile.mkdtemp(prefix="dshistory-faults-")) / "fault_injector.so"
    source = Path(__file__).with_name("fault_injector.c")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
    return library
