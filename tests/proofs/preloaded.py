"""Compiles the libraries that `LD_PRELOAD` puts into a program; they go with the process that needed them."""

import functools
import os
import subprocess
import tempfile
from pathlib import Path

__all__ = ["fault_injector", "recorder"]


def fault_injector() -> Path:
    """Return the library that fails one call."""
    return _compiled("fault_injector")


def recorder() -> Path:
    """Return the library that records every call which changes files."""
    return _compiled("recorder")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dshistory-preloaded-")


@functools.cache
def _compiled(name: str) -> Path:
    library = Path(_folder().name) / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    compiler = os.environ.get("CC", "cc")
    options = ["-O1", "-shared", "-fPIC", "-Wall", "-Werror"]
    subprocess.run([compiler, *options, "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library
