"""One file of a DeepSpeed checkpoint: read as data, whether DeepSpeed or `capture.checkpoint_engine` wrote it, and
written as DeepSpeed does."""

from pathlib import Path
from typing import Any

import torch

from capture.deepspeed_checkpoints.file import is_tree_file, map_tree
from capture.deepspeed_checkpoints.tree import decode_tree
from catalog.errors import FormatError
from dshistory.conversion.deepspeed_classes import KNOWN, KNOWN_BY_TAG, DeepSpeedPickle, PickledBytes
from dshistory.conversion.importing.safe_unpickle import load_torch_file

__all__ = ["load_deepspeed_file", "load_tree_file", "save_deepspeed_file"]


def load_deepspeed_file(path: Path) -> Any:
    """Return the content; tensors are mapped from the file, and objects of DeepSpeed's classes are stand-ins.

    A file of ours is verified whole: CorruptError names what does not match. UnsupportedError, with the classes, for a
    pickle of more than data; FormatError for a file that can't be read."""
    if not path.is_file():
        raise FormatError(f"{path} is not a file")
    return load_tree_file(path) if is_tree_file(path) else load_torch_file(path, known=KNOWN)


def load_tree_file(path: Path) -> Any:
    """Return the content of a file of `capture.checkpoint_engine`. What it holds as a pickle stays a PickledBytes."""
    tree, tensors = map_tree(path)
    return decode_tree(tree, tensors, what=str(path), known=KNOWN_BY_TAG, pickle=PickledBytes)


def save_deepspeed_file(content: Any, path: Path) -> None:
    """Call torch.save; stand-ins of DeepSpeed's classes are written under the names of the real ones."""
    torch.save(content, path, pickle_module=DeepSpeedPickle)
