"""Makes updates again: a checkpoint's optimizer in memory gets the recorded input of one step after the other."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from capture.load.assignments import Assignment, assign
from capture.load.objects import read_objects
from capture.load.read_into import read_into
from capture.state.dtypes import torch_dtype
from capture.state.objects import Decoder, decode_object
from capture.state.update_rule import known_optimizer
from catalog.errors import FormatError, MismatchError, UnsupportedError
from catalog.format.redo_file import RedoTensor
from catalog.history import History
from catalog.read.fragments import StoredTensor, choose
from catalog.read.redo import RedoRecord
from catalog.read.redo_allowance import RedoAllowance
from catalog.records import CheckpointRef

__all__ = ["Key", "RepeatedUpdates"]

Key = tuple[str, str]
"""The kind and the name of a tensor."""

_OBJECT = "optimizer"
_FAILURES = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError)
"""An optimizer that gets something else than numbers may fail in any of these ways."""


class RepeatedUpdates:
    """The state of a training after `base`, and after each record that is applied.

    stored: the tensors of `base`; of which the parameters of the optimizer, and its state, are read into memory
    first: the record of the step after it
    """

    def __init__(
        self, history: History, base: CheckpointRef, stored: Mapping[Key, StoredTensor], first: RedoRecord
    ) -> None:
        self._saved = _objects_of(history, base)
        saved = self._saved[_OBJECT]
        self._what = f"run {base.run}"
        self._names = [name for names in first.segment.params for name in names]
        self._params = first.segment.params
        self.kinds = frozenset([*saved["kinds"], *saved.get("other_kinds", ())])
        rule = known_optimizer(first.rule.get("class"))
        make: Callable[..., torch.optim.Optimizer] = rule
        if saved["class"].rsplit(".", 1)[-1] != rule.__name__:
            raise MismatchError(
                f"{self._what}: the optimizer of {base} is a {saved['class']}, that of the redo log a {rule.__name__}"
            )
        self._read(history, base, stored)
        groups = _groups(first)
        try:
            self._optimizer = make(
                [
                    {**group, "params": [self._parameters[name] for name in names]}
                    for names, group in zip(self._params, groups, strict=True)
                ]
            )
            for name, parameter in self._parameters.items():
                state = {**self._state[name], **saved.get("values", {}).get(name, {})}
                if state:
                    self._optimizer.state[parameter].update(state)
        except _FAILURES as error:
            raise FormatError(
                f"{first.segment.path}: its param groups are none of a {rule.__name__}: {error}"
            ) from error
        self._buffers: dict[str, torch.Tensor] = {}
        self._objects: dict[str, bytes] = {}
        self._allowance = RedoAllowance(
            {name: (stored["model", name].dtype, stored["model", name].shape) for name in self._names},
            buffer_bytes=sum(buffer.nbytes for (kind, _), buffer in stored.items() if kind == "buffer"),
        )

    def objects(self) -> dict[str, Any]:
        """Return the objects of the step by name: those of the checkpoint, and instead of them what was recorded since.
        UnsupportedError for one that was too large to be recorded.
        """
        too_large = sorted(name for name, text in self._objects.items() if not text)
        if too_large:
            raise UnsupportedError(
                f"{self._what}: the object {too_large[0]!r} was too large for the redo log, so no training can go on "
                "from this step: restore it without a target, or a checkpoint"
            )
        recorded = {name: decode_object(name, text, tensor=_no_entry) for name, text in self._objects.items()}
        return {**self._saved, **recorded}

    def apply(self, record: RedoRecord) -> None:
        """Make the update of the next step. CorruptError, which names the tensor, for damaged bytes; FormatError for
        what no training would have recorded."""
        where = f"{record.segment.path}: step {record.step}"
        if record.segment.params != self._params:
            raise MismatchError(f"{where}: the optimizer has other parameters from this step on")
        self._allowance.admit(record)
        given = [(tensor, _elements(tensor, content)) for tensor, content in record.tensors()]
        for parameter in self._parameters.values():
            parameter.grad = None
        try:
            for tensor, elements in given:
                if tensor.kind == "object":
                    self._objects[tensor.name] = elements.numpy().tobytes()
                elif tensor.kind == "buffer":
                    self._buffers[tensor.name] = elements
                else:
                    self._parameters[tensor.name].grad = elements
            for group, recorded in zip(self._optimizer.param_groups, _groups(record), strict=True):
                group.update(recorded)
            # Without the hooks that torch puts around it, for a script's own hooks are not of this optimizer.
            step = type(self._optimizer).step
            getattr(step, "__wrapped__", step)(self._optimizer)
        except _FAILURES as error:
            raise FormatError(f"{where}: is no input of a {type(self._optimizer).__name__}: {error}") from error

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return what the updates have made so far, as it is in memory: parameters, optimizer state, and the buffers
        that have changed."""
        found: dict[Key, torch.Tensor] = {("buffer", name): buffer for name, buffer in self._buffers.items()}
        for name, parameter in self._parameters.items():
            found["model", name] = parameter.detach()
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[kind, name] = value
        return found

    def _read(self, history: History, base: CheckpointRef, stored: Mapping[Key, StoredTensor]) -> None:
        assignments: list[Assignment] = []
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._state: dict[str, dict[str, torch.Tensor]] = {}
        for name in self._names:
            if ("model", name) not in stored:
                raise MismatchError(f"checkpoint {base} has no parameter {name!r}, which the redo log updates")
            weight = _read_later(stored["model", name], assignments)
            self._parameters[name] = torch.nn.Parameter(weight, requires_grad=weight.is_floating_point())
            self._state[name] = {
                kind: _read_later(stored[kind, name], assignments) for kind in self.kinds if (kind, name) in stored
            }
        read_into(history.root, assignments)


def _objects_of(history: History, base: CheckpointRef) -> Mapping[str, Any]:
    extents = history.extents(base, kinds=("object", "object_tensor"))
    found = read_objects(history.root, choose(extents, rank=0))
    saved = found.get(_OBJECT)
    if not isinstance(saved, dict) or not isinstance(saved.get("class"), str) or "kinds" not in saved:
        raise MismatchError(f"checkpoint {base} has no optimizer of torch from which a step could be made")
    return found


def _read_later(stored: StoredTensor, assignments: list[Assignment]) -> torch.Tensor:
    tensor = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
    assignments += assign(stored.fragments, tensor, start=0, numel=stored.numel)
    return tensor


def _elements(tensor: RedoTensor, content: bytearray) -> torch.Tensor:
    dtype = torch_dtype(tensor.dtype)
    made = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return made.view(tensor.shape)


def _groups(record: RedoRecord) -> list[dict[str, Any]]:
    groups: Any = Decoder(_no_entry).value(record.content.groups, "param_groups")
    plain = isinstance(groups, list) and all(isinstance(group, dict) and "params" not in group for group in groups)
    if not plain or len(groups) != len(record.segment.params):
        raise FormatError(f"{record.segment.path}: step {record.step}: its param groups are no list of objects")
    found: list[dict[str, Any]] = groups
    return found


def _no_entry(name: str) -> torch.Tensor:
    raise FormatError(f"{name!r} is no tensor of a redo log")
