"""Reads checkpoint folders of Hugging Face's Trainer: weights, optimizer, scheduler, scaler, random numbers and log.

The weights, and with DeepSpeed the optimizer, are read by the reader of their own format. The objects are those that a
capture of the Trainer has, so the step can be restored, and a Trainer goes on from it (`dshistory.resume_folder`)."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from capture.deepspeed_checkpoints.torch_files import NUMPY
from capture.state.objects import encode_object
from catalog.errors import FormatError, UnsupportedError
from dshistory.conversion.importing import deepspeed, safetensors, torchfile
from dshistory.conversion.importing.foreign_checkpoint import ForeignCheckpoint, ForeignTensor, in_memory
from dshistory.conversion.importing.huggingface_names import ModelNames, model_names
from dshistory.conversion.importing.safe_unpickle import load_torch_file

__all__ = ["read", "recognises"]

_STATE: Final = "trainer_state.json"
_OPTIMIZER: Final = "optimizer.pt"
_OBJECTS: Final = {"scheduler.pt": "lr_scheduler", "scaler.pt": "loss_scaler"}
_MARKS: Final = (_STATE, _OPTIMIZER, *_OBJECTS, "rng_state.pth", "rng_state_0.pth", "training_args.bin")
_WEIGHTS: Final = {
    deepspeed: re.compile(r"global_step\d+|latest|zero_to_\w+\.py|.*\.safetensors(\.index\.json)?"),
    safetensors: re.compile(r".*\.safetensors(\.index\.json)?"),
    torchfile: re.compile(r"pytorch_model\.bin"),
}
"""The readers of weights, and the names in the folder that need no reader besides them."""
_ALSO: Final = {"loss": ("loss", "trainer_loss"), "learning_rate": ("lr", "learning_rate")}
"""The names under which a history has values of the Trainer's log; a capture has a `loss` of its own beside it."""
_RULES: Final = (
    ({"decoupled_weight_decay": True}, "torch.optim.adamw.AdamW"),
    ({"decoupled_weight_decay": False}, "torch.optim.adam.Adam"),
    ({"nesterov": None}, "torch.optim.sgd.SGD"),
    ({"scale_parameter": None}, "transformers.optimization.Adafactor"),
)
"""The hyperparameters tell an optimizer's class, which its file does not name."""


def recognises(path: Path) -> bool:
    """True for a folder with weights and a file that the Trainer writes beside them."""
    return any((path / name).is_file() for name in _MARKS) and _reader(path) is not None


def read(path: Path) -> ForeignCheckpoint:
    """Read everything but the pickled arguments of the training, and name what is left out: every file that is not
    read, and why one that could have been is not, such as one that holds more than data.

    Raises what the reader of the weights raises, and FormatError for a damaged file."""
    reader = _reader(path)
    assert reader is not None, "recognises comes first"
    found: ForeignCheckpoint = reader.read(path)
    known = _WEIGHTS[reader]
    rest = sorted(child.name for child in path.iterdir() if not known.fullmatch(child.name))
    return _Folder(path, found, rest).content()


def _reader(path: Path) -> ModuleType | None:
    return next((reader for reader in _WEIGHTS if path.is_dir() and reader.recognises(path)), None)


class _Folder:
    """A folder that is being read: what was found so far, and the names of what was not."""

    def __init__(self, path: Path, weights: ForeignCheckpoint, rest: Sequence[str]) -> None:
        self._path = path
        self._tensors = list(weights.tensors)
        self._objects = dict(weights.objects)
        self._weights = weights
        self._rest = list(rest)
        self._left_out = [one for one in weights.left_out if not (path / one).exists()]

    def content(self) -> ForeignCheckpoint:
        state = self._trainer_state()
        step = state.get("global_step")
        for file, name in _OBJECTS.items():
            if file in self._rest:
                self._rest.remove(file)
                # With DeepSpeed its own files have the schedule, and this file only repeats it.
                if name not in self._objects:
                    self._add_object(name, file)
        if _OPTIMIZER in self._rest:
            self._add_optimizer()
        random = self._random_state()
        if random is not None:
            self._objects["rng"] = random
            if state:
                of_trainer = {name: value for name, value in state.items() if name != "log_history"}
                self._objects["trainer"] = {"state": of_trainer, "rng": random}
        if isinstance(step, int):
            self._objects.setdefault("counters", {"global_steps": step, "scheduler_by_epochs": 0})
        return replace(
            self._weights,
            tensors=self._tensors,
            objects=self._objects,
            step=step if isinstance(step, int) else self._weights.step,
            left_out=[*self._left_out, *self._rest],
            metrics=_metrics(state.get("log_history", ())),
        )

    def _trainer_state(self) -> dict[str, Any]:
        if _STATE not in self._rest:
            return {}
        self._rest.remove(_STATE)
        try:
            state = json.loads((self._path / _STATE).read_text())
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self._path / _STATE} can't be read as JSON: {error}") from error
        if not isinstance(state, dict):
            raise FormatError(f"{self._path / _STATE} must hold a JSON object, not a {type(state).__name__}")
        return state

    def _add_object(self, name: str, file: str) -> None:
        try:
            value = load_torch_file(self._path / file)
            encode_object(name, value)
        except UnsupportedError as error:
            self._left_out.append(f"{file} ({error})")
        else:
            self._objects[name] = value

    def _random_state(self) -> dict[str, Any] | None:
        name = next((name for name in ("rng_state.pth", "rng_state_0.pth") if name in self._rest), None)
        if name is None:
            return None
        self._rest.remove(name)
        try:
            saved = load_torch_file(self._path / name, known=NUMPY)
        except UnsupportedError as error:
            self._left_out.append(f"{name} ({error})")
            return None
        if not isinstance(saved, Mapping) or not {"python", "numpy", "cpu"} <= saved.keys():
            raise FormatError(f"{self._path / name} has no states under 'python', 'numpy' and 'cpu'")
        found = {"python": saved["python"], "numpy": saved["numpy"], "torch": saved["cpu"]}
        if "cuda" in saved:
            found["cuda"] = [saved["cuda"]] if isinstance(saved["cuda"], torch.Tensor) else list(saved["cuda"])
        return found

    def _add_optimizer(self) -> None:
        self._rest.remove(_OPTIMIZER)
        try:
            names = model_names(self._path, most_layers=len(self._tensors))
            self._tensors = [_as_in(names, one) for one in self._tensors]
            content, tensors = _optimizer(load_torch_file(self._path / _OPTIMIZER), names)
        except UnsupportedError as error:
            self._left_out.append(f"{_OPTIMIZER} ({error})")
            return
        self._objects["optimizer"] = content
        self._tensors += tensors


def _as_in(names: ModelNames, tensor: ForeignTensor) -> ForeignTensor:
    """Return a tensor of the weights as a capture has it: buffers as their own kind, ties under all their names."""
    if tensor.name in names.buffers:
        return replace(tensor, kind="buffer")
    aliases = {*tensor.aliases, *names.aliases.get(tensor.name, ())}
    return replace(tensor, aliases=tuple(sorted(aliases)))


def _optimizer(saved: Any, names: ModelNames) -> tuple[dict[str, Any], list[ForeignTensor]]:
    """Return the object `optimizer` that a capture has, and the tensors of its state by the names of their parameters.

    UnsupportedError when the order of the parameters can't be shown by their shapes."""
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise UnsupportedError("it is no state dict of an optimizer")
    groups = names.groups([len(group["params"]) for group in saved["param_groups"]])
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, (name for group in groups for name in group), strict=True))
    tensors: list[ForeignTensor] = []
    kinds: set[str] = set()
    other_kinds: set[str] = set()
    values: dict[str, dict[str, Any]] = {}
    for number, state in saved["state"].items():
        name = owners.get(number)
        if name is None:
            raise UnsupportedError(f"its state {number!r} belongs to no parameter")
        shape, like = names.parameters[name], set[str]()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                (like if tuple(value.shape) == shape else other_kinds).add(key)
                tensors.append(in_memory(key, name, value))
            else:
                values.setdefault(name, {})[key] = value
        if not like:
            raise UnsupportedError(f"none of its state {number} has the shape {list(shape)} of {name}")
        kinds |= like
    hyper = [{key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]]
    content = {
        "class": _rule(hyper[0]),
        "groups": [{**one, "params": own} for one, own in zip(hyper, groups, strict=True)],
        "kinds": sorted(kinds),
        "other_kinds": sorted(other_kinds - kinds),
        "values": values,
        "globals": {},
        "state": {},
    }
    encode_object("optimizer", content)
    return content, tensors


def _rule(hyper: Mapping[str, Any]) -> str:
    return next(
        (
            name
            for marks, name in _RULES
            if all(key in hyper and (value is None or hyper[key] == value) for key, value in marks.items())
        ),
        "unknown",
    )


def _metrics(log: Any) -> dict[tuple[int, str], float]:
    """Return the numbers of the Trainer's log by step and name."""
    found = {}
    for entry in log if isinstance(log, list) else ():
        step = entry.get("step") if isinstance(entry, dict) else None
        if isinstance(step, int) and step >= 0:
            for key, value in entry.items():
                if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                    found.update({(step, name): float(value) for name in _ALSO.get(key, (key,))})
    return found
