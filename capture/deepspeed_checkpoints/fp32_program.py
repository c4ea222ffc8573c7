"""The program `zero_to_fp32.py` that a save leaves beside its tags: DeepSpeed's own, which here reads our files too.

DeepSpeed puts a copy of its own program there, which knows only torch.save. Ours takes its place and its name, because
`zero_to_torch.py` beside it imports it by that name.
"""

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any, Final

import torch

from capture.deepspeed_checkpoints.file import is_tree_file, map_tree
from capture.deepspeed_checkpoints.torch_files import load_torch_file, redirect_torch_load
from capture.deepspeed_checkpoints.tree import decode_tree
from catalog.disk.durable import publish_bytes

__all__ = ["PROGRAM_NAME", "is_program", "leave_program", "run_deepspeeds"]

PROGRAM_NAME: Final = "zero_to_fp32.py"
_MODULE: Final = "deepspeed.utils.zero_to_fp32"
_TEXT: Final = '''#!/usr/bin/env python
"""Make one fp32 state dict of this DeepSpeed checkpoint: python zero_to_fp32.py . OUTPUT (--help lists the options).

It is DeepSpeed's own program. It was left here by DSHistory, whose capture.checkpoint_engine has saved this checkpoint,
so that it reads these files as well as those of torch.save.
"""

try:
    from capture.deepspeed_checkpoints.fp32_program import run_deepspeeds
except ImportError as error:
    raise SystemExit(
        f"this checkpoint was saved through DSHistory's capture.checkpoint_engine, and DSHistory isn't here: {error}\\n"
        "Install it, or make an ordinary checkpoint of the folder where it is installed: dshistory convert FOLDER"
    )

run_deepspeeds(__name__)
'''


def leave_program(folder: Path) -> None:
    """Put the program in the place of DeepSpeed's copy, if there is one in `folder`. OSError when that fails."""
    path = folder / PROGRAM_NAME
    if path.is_file():
        mode = path.stat().st_mode
        publish_bytes(_TEXT.encode(), path)
        path.chmod(mode)


def is_program(path: Path) -> bool:
    """Return whether the file is what `leave_program` leaves. OSError when it can't be read."""
    return path.name == PROGRAM_NAME and path.read_bytes() == _TEXT.encode()


def run_deepspeeds(name: str) -> None:
    """Run DeepSpeed's program on this process's arguments; or, for another `name` than `__main__`, let its module stand
    in for the module of that name.
    """
    if name == "__main__":
        # The program loads what it runs itself, and nothing else runs in this process.
        torch.load = _load  # type: ignore[assignment]
        runpy.run_module(_MODULE, run_name="__main__")
    else:
        module = importlib.import_module(_MODULE)
        redirect_torch_load(module, _load)
        sys.modules[name] = module


def _load(path: Any, **_: Any) -> Any:
    """Return the content of a checkpoint's file in host memory. What is pickled in it is left out: no weights are."""
    from capture.deepspeed_checkpoints.classes import DEEPSPEED_CLASSES

    file = Path(path)
    if is_tree_file(file):
        tree, tensors = map_tree(file)
        return decode_tree(tree, tensors, what=str(file), known=DEEPSPEED_CLASSES, pickle=lambda _: None)
    return load_torch_file(file, map_location="cpu", classes=[one.cls for one in DEEPSPEED_CLASSES], pickle=False)
