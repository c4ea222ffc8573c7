"""The environment of a run: what its numbers may depend on beside its state, and how somebody runs it again.

Nothing here is needed to restore a step. It tells why a replay of one may not give the same bits: another version,
number of threads, deterministic flag, or code.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["environment"]

_PACKAGES: Final = ("torch", "numpy", "deepspeed", "transformers", "accelerate", "torchdata", "peft", "datasets")
_VARIABLES: Final = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
_MOST_OF_DIFF: Final = 32 << 10
_GIT_LIMIT_S: Final = 2.0


def environment() -> dict[str, Any]:
    """Return JSON: command line, git commit and difference from it, packages, processor, threads, deterministic flags,
    devices. What can't be found out is null; nothing is raised.
    """
    return {
        "command": list(sys.orig_argv),
        "folder": str(Path.cwd()),
        "code": dict(_code()),
        "packages": {name: _version(name) for name in _PACKAGES if name in sys.modules},
        "python": platform.python_version(),
        "processor": {"machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()},
        "threads": {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()},
        "flags": _flags(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "devices": _devices(),
    }


def _flags() -> dict[str, Any]:
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
    }


def _devices() -> dict[str, Any]:
    # A look at a device that the training does not use would take memory there.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    names = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    return {"names": names, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _code() -> Mapping[str, Any]:
    """Return the commit that the script's folder is at, and how its files differ from it. The code of a process is what
    it has imported, so this looks once.
    """
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] not in ("", "-c", "-m") else None
    folder = script.resolve().parent if script is not None and script.is_file() else Path.cwd()
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "diff": None, "diff_hash": None}
    diff = _git(folder, "diff", "HEAD")
    return {
        "commit": commit.strip(),
        "diff": None if diff is None else diff[:_MOST_OF_DIFF],
        "diff_hash": None if diff is None else hashlib.sha256(diff.encode()).hexdigest(),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "--no-optional-locks", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
