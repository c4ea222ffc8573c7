"""Reads state dicts from files of torch.save, with or without an optimizer's, as training scripts write them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from catalog.errors import FormatError
from dshistory.conversion.importing.foreign_checkpoint import ForeignCheckpoint, ForeignTensor, in_memory, other_files
from dshistory.conversion.importing.safe_unpickle import load_torch_file

__all__ = ["model_tensors", "optimizer_tensors", "read", "recognises"]

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_FOLDER_FILE = "pytorch_model.bin"
_MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_STEP_KEYS = ("global_step", "global_steps", "step", "iteration")


def recognises(path: Path) -> bool:
    """True for a file *.pt, *.pth, *.bin or *.ckpt, and for a folder with a pytorch_model.bin."""
    if path.is_dir():
        return (path / _FOLDER_FILE).is_file()
    return path.suffix in _SUFFIXES and path.is_file()


def read(path: Path) -> ForeignCheckpoint:
    """Read the model's state dict as kind `model`, tied tensors once with their aliases, and the optimizer's state,
    with its own keys as kinds.

    The optimizer's state is left out unless its groups name their parameters, or its parameters are all of the model's,
    in order."""
    file = path / _FOLDER_FILE if path.is_dir() else path
    content = load_torch_file(file)
    if not isinstance(content, Mapping):
        raise FormatError(f"{file} holds a {type(content).__name__}, not a state dict")
    state = next((content[key] for key in _MODEL_KEYS if isinstance(content.get(key), Mapping)), content)
    tensors = model_tensors(state)
    if not tensors:
        raise FormatError(f"{file} has no tensors under names; its keys are {', '.join(map(str, list(content)[:5]))}")
    saved = next((content[key] for key in _OPTIMIZER_KEYS if isinstance(content.get(key), Mapping)), None)
    left_out = [
        str(key) for key, value in content.items() if state is not content and value is not state and value is not saved
    ]
    found: list[ForeignTensor] | None = [] if saved is None or state is content else optimizer_tensors(saved, tensors)
    if found is None:
        left_out.append("optimizer (its parameters have no names)")
    if path.is_dir():
        left_out += other_files(path, [file])
    step = next((content[key] for key in _STEP_KEYS if type(content.get(key)) is int), None)
    return ForeignCheckpoint([*tensors, *(found or [])], step=step, left_out=left_out)


def model_tensors(state: Mapping[Any, Any]) -> list[ForeignTensor]:
    """Return each tensor of a state dict once, with the other names of the same memory as aliases."""
    first: dict[Any, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        mark = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        if mark in first:
            aliases[first[mark]].append(str(name))
        else:
            first[mark] = str(name)
            aliases[str(name)] = []
    return [in_memory("model", name, state[name].detach(), tuple(names)) for name, names in aliases.items()]


def optimizer_tensors(saved: Mapping[str, Any], tensors: list[ForeignTensor]) -> list[ForeignTensor] | None:
    """Return the tensors of an optimizer's state; None when it is unknown which parameter each belongs to."""
    groups, state = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        return None
    numbers = [number for group in groups for number in group["params"]]
    named = [name for group in groups for name in group.get("param_names", ())]
    by_name = {tensor.name: tensor for tensor in tensors}
    names = named if named else list(by_name) if len(groups) == 1 else []
    if len(names) != len(numbers) or not all(name in by_name for name in names):
        return None
    owners = dict(zip(numbers, names, strict=True))
    found = []
    for number, values in state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                if value.dim() and tuple(value.shape) != by_name[owners[number]].shape and not named:
                    return None
                found.append(in_memory(key, owners[number], value))
    return found
