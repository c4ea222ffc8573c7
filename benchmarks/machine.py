"""The machine on which the figures were measured."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "numpy", "duckdb", "pyarrow", "deepspeed", "safetensors", "torchsnapshot", "dshistory")


def facts(folder: Path) -> dict[str, object]:
    """Return processor, memory, kernel, file system of `folder`, versions and commit, without host name and paths."""
    return {
        "processor": _first_field("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_gib": round(int(_first_field("/proc/meminfo", "MemTotal").split()[0]) / (1 << 20), 1),
        "kernel": platform.release(),
        "file_system": file_system(folder),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": _commit(),
    }


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds `folder`: that of the mount with the longest matching path."""
    target = folder.resolve()
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        place = Path(mount.replace("\\040", " "))
        if target.is_relative_to(place) and len(place.parts) >= len(best.parts):
            best, kind = place, found
    return kind


def _first_field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "0"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit that is measured, marked where other files than results of benchmarks differ from it."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results")
    return commit + "-dirty" if commit and changed else commit


def _git(*arguments: str) -> str | None:
    answer = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return answer.stdout.strip() or None
