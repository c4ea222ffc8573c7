"""Makes updates again: a checkpoint's optimizer in memory gets the recorded input of one step after the other."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import torch

from capture.load.assignments import Assignment, assign
from capture.load.read_into import read_into
from capture.loops.deepspeed.flat_tensors import Flat
from capture.loops.deepspeed.param_groups import replay_bias_correction
from capture.state.dtypes import torch_dtype
from capture.state.objects import Decoder
from capture.state.update_rule import CPU_ADAM, known_optimizer
from catalog.errors import FormatError, MismatchError, UnsupportedError
from catalog.format.redo_segment import RedoFlat, RedoFragment, RedoTensor
from catalog.history import History
from catalog.read.fragments import StoredTensor
from catalog.read.redo import RedoRecord
from catalog.records import CheckpointRef

__all__ = ["Key", "RepeatedUpdates", "elements_of", "kind_of", "no_entry", "optimizer_of"]

Key = tuple[str, str]
"""The kind and the name of a tensor."""

_MOST_PADDING = 1 << 20
"""A flat tensor has at most so many elements beside twice those of all parameters: partitions are padded a little."""

_FAILURES = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, AssertionError)
"""An optimizer that gets something else than numbers may fail in any of these ways."""


class RepeatedUpdates:
    """What the optimizer of one rank has made of the state of `base`, after each record that is applied.

    stored: the tensors of `base`; of which what the optimizer updates, and its state, are read into memory
    saved: the object `optimizer` of `base`
    first: the record of the step after it
    """

    def __init__(
        self,
        history: History,
        base: CheckpointRef,
        stored: Mapping[Key, StoredTensor],
        saved: Mapping[str, Any],
        first: RedoRecord,
    ) -> None:
        self._writes = first.segment.writes
        self._flats = {flat.name: flat for flat in self._writes.flats}
        self._names = [name for names in self._writes.params for name in names]
        self.kinds = frozenset([*saved["kinds"], *saved.get("other_kinds", ())])
        rule = _class_of(first.rule)
        if saved["class"].rsplit(".", 1)[-1] != rule:
            raise MismatchError(
                f"run {base.run}: the optimizer of {base} is a {saved['class']}, that of the redo log a {rule}"
            )
        self._read(history, base, stored)
        groups = _groups(first)
        try:
            self._optimizer = _maker(first.rule)(
                [
                    {**group, "params": [self._updated[name] for name in names]}
                    for names, group in zip(self._writes.params, groups, strict=True)
                ]
            )
            for index, names in enumerate(self._writes.params):
                for name in names:
                    state = {**self._state[name], **_values(saved, name, index)}
                    if state:
                        self._optimizer.state[self._updated[name]].update(state)
            replay_bias_correction(self._optimizer, self._live_flats())
        except _FAILURES as error:
            raise FormatError(f"{first.segment.path}: its param groups are none of a {rule}: {error}") from error

    def apply(self, record: RedoRecord, gradients: Mapping[str, torch.Tensor]) -> None:
        """Make the update of the next step."""
        where = f"{record.segment.path}: step {record.step}"
        writes = record.segment.writes
        if (writes.params, writes.flats) != (self._writes.params, self._writes.flats):
            raise MismatchError(f"{where}: the optimizer has other parameters from this step on")
        if not record.content.applied:
            return
        for tensor in self._updated.values():
            tensor.grad = None
        try:
            for name, gradient in gradients.items():
                self._updated[name].grad = gradient
            for group, recorded in zip(self._optimizer.param_groups, _groups(record), strict=True):
                group.update(recorded)
            for names in writes.calls or [self._names]:
                self._call(frozenset(names))
        except _FAILURES as error:
            raise FormatError(f"{where}: is no input of a {type(self._optimizer).__name__}: {error}") from error

    def tensors(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Yield what an optimizer without flat tensors has made: the parameters and its state."""
        for name, parameter in self._updated.items():
            yield ("model", name), parameter.detach()
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield (kind, name), value

    def parts(self) -> Iterator[tuple[str, RedoFragment, torch.Tensor]]:
        """Yield the part of a parameter that each fragment of a flat tensor is, of each kind: the model's or master
        weights, and the optimizer's state."""
        for name, flat in self._flats.items():
            tensor = self._updated[name]
            values = {kind_of(flat): tensor.detach(), **self._optimizer.state.get(tensor, {})}
            for kind, value in values.items():
                if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                    elements = value.view(-1)
                    for part in flat.fragments:
                        yield kind, part, elements[part.offset : part.offset + part.numel]

    def _call(self, names: frozenset[str]) -> None:
        """Let the optimizer update these, as one call of its own."""
        for group, members in zip(self._optimizer.param_groups, self._writes.params, strict=True):
            group["params"] = [self._updated[name] for name in members if name in names]
        # Without the hooks that torch puts around it, for a script's own hooks are not of this optimizer.
        step = type(self._optimizer).step
        getattr(step, "__wrapped__", step)(self._optimizer)

    def _live_flats(self) -> list[Flat]:
        groups = {name: index for index, names in enumerate(self._writes.params) for name in names}
        return [Flat(self._updated[name], groups[name], one.placement, ()) for name, one in self._flats.items()]

    def _read(self, history: History, base: CheckpointRef, stored: Mapping[Key, StoredTensor]) -> None:
        assignments: list[Assignment] = []
        self._updated: dict[str, torch.Tensor] = {}
        self._state: dict[str, dict[str, torch.Tensor]] = {}
        for name in self._names:
            if name in self._flats:
                self._read_flat(self._flats[name], base, stored, assignments)
                continue
            if ("model", name) not in stored:
                raise MismatchError(f"checkpoint {base} has no parameter {name!r}, which the redo log updates")
            weight = _read_later(stored["model", name], assignments)
            self._updated[name] = torch.nn.Parameter(weight, requires_grad=weight.is_floating_point())
            self._state[name] = {
                kind: _read_later(stored[kind, name], assignments) for kind in self.kinds if (kind, name) in stored
            }
        read_into(history.root, assignments)

    def _read_flat(
        self,
        flat: RedoFlat,
        base: CheckpointRef,
        stored: Mapping[Key, StoredTensor],
        assignments: list[Assignment],
    ) -> None:
        """Make a flat tensor as it was, and its state: padding is zero, which no element-wise update mixes with the
        rest."""
        weights = kind_of(flat)
        size, most = prod(flat.shape), 2 * sum(one.numel for (kind, _), one in stored.items() if kind == weights)
        if size > most + _MOST_PADDING:
            raise FormatError(
                f"the redo log of run {base.run} has a flat tensor of {size} elements, {base} {most // 2}"
            )
        # Of a kind that a parameter has, every parameter has some.
        dtypes = {kind: one.dtype for (kind, _), one in stored.items() if kind in (weights, *self.kinds)}
        if dtypes.get(weights) != flat.dtype:
            raise MismatchError(
                f"checkpoint {base} has {dtypes.get(weights)} {weights} weights, the redo log {flat.dtype}"
            )
        tensors = {kind: torch.zeros(flat.shape, dtype=torch_dtype(dtype)) for kind, dtype in dtypes.items()}
        for kind, tensor in tensors.items():
            for part in flat.fragments:
                one = stored.get((kind, part.name))
                if one is None or one.dtype != dtypes[kind] or part.start + part.numel > one.numel:
                    raise MismatchError(
                        f"checkpoint {base} has no {kind} {part.name!r} of {part.start + part.numel} elements, which "
                        "the redo log updates"
                    )
                assignments += assign(one.fragments, tensor, start=part.start, numel=part.numel, at=part.offset)
        self._updated[flat.name] = tensors.pop(weights).requires_grad_()
        self._state[flat.name] = tensors


def kind_of(flat: RedoFlat) -> str:
    """Return the kind of what a flat tensor holds."""
    return "model" if flat.is_model else "master"


def optimizer_of(objects: Mapping[str, Any], base: CheckpointRef) -> Mapping[str, Any]:
    """Return the optimizer among the objects of `base`. MismatchError when it has none that can be made again."""
    saved = objects.get("optimizer")
    if not isinstance(saved, dict) or not isinstance(saved.get("class"), str) or "kinds" not in saved:
        raise MismatchError(f"checkpoint {base} has no optimizer of torch from which a step could be made")
    return saved


def _class_of(rule: Mapping[str, Any]) -> str:
    """Return the name of the class of optimizers that a log names. FormatError when it is none that can be recorded."""
    return CPU_ADAM if rule.get("class") == CPU_ADAM else known_optimizer(rule.get("class")).__name__


def _maker(rule: Mapping[str, Any]) -> Callable[..., torch.optim.Optimizer]:
    if rule.get("class") != CPU_ADAM:
        return known_optimizer(rule.get("class"))
    try:
        from capture.loops.deepspeed.cpu_adam import RepeatedCPUAdam
    except ImportError as error:
        raise UnsupportedError(
            f"an update of {CPU_ADAM} is made again by DeepSpeed, which can't be imported here: {error}"
        ) from error
    flags = {name: rule[name] for name in ("adam_w_mode", "fp32_optimizer_states")}
    return partial(RepeatedCPUAdam, **flags)


def _values(saved: Mapping[str, Any], name: str, group: int) -> dict[str, Any]:
    """Return the state of a tensor that is not stored as a tensor: its own, or that of its whole group."""
    shared = {key: values[group] for key, values in saved.get("state", {}).items() if values[group] is not None}
    own = saved.get("values", {}).get(name, {})
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in {**shared, **own}.items()
    }


def _read_later(stored: StoredTensor, assignments: list[Assignment]) -> torch.Tensor:
    tensor = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
    assignments += assign(stored.fragments, tensor, start=0, numel=stored.numel)
    return tensor


def elements_of(tensor: RedoTensor, content: bytearray) -> torch.Tensor:
    """Return recorded bytes as the tensor that they are of."""
    dtype = torch_dtype(tensor.dtype)
    made = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return made.view(tensor.shape)


def _groups(record: RedoRecord) -> list[dict[str, Any]]:
    groups: Any = Decoder(no_entry).value(record.content.groups, "param_groups")
    plain = isinstance(groups, list) and all(isinstance(group, dict) and "params" not in group for group in groups)
    if not plain or len(groups) != len(record.segment.writes.params):
        raise FormatError(f"{record.segment.path}: step {record.step}: its param groups are no list of objects")
    found: list[dict[str, Any]] = groups
    return found


def no_entry(name: str) -> torch.Tensor:
    """Refuse a tensor that is not in the tree of an object itself."""
    raise FormatError(f"{name!r} is no tensor of a redo log")
