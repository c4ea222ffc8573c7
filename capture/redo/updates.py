"""Makes updates again: a checkpoint's optimizer in memory gets the recorded input of one step after the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from capture.load.assignments import Assignment, assign
from capture.load.read_into import read_into
from capture.loops.deepspeed.bias_correction import repeat_products, updates_of
from capture.redo.pieces import Pieces
from capture.state.dtypes import torch_dtype
from capture.state.objects import Decoder
from capture.state.update_rule import CPU_ADAM, known_optimizer
from catalog.errors import FormatError, MismatchError, UnsupportedError
from catalog.format.redo_segment import BIAS_CORRECTION_SINCE, RedoFlat, RedoFragment, RedoTensor
from catalog.history import History
from catalog.read.fragments import StoredTensor
from catalog.read.redo import RedoRecord
from catalog.records import CheckpointRef, Extent

__all__ = ["Key", "RepeatedUpdates", "elements_of", "kind_of", "no_entry", "optimizer_of", "read_later"]

Key = tuple[str, str]
"""The kind and the name of a tensor."""

_FAILURES = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, AssertionError)
"""An optimizer that gets something else than numbers may fail in any of these ways."""


class RepeatedUpdates:
    """Holds what the optimizer of one rank has made of the state of `base`, after each record that is applied.

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
        groups, make = _groups(first), _maker(first.rule)
        self._since = _since(groups)
        try:
            self._optimizer = make(
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
            self._repeat_products(self._since)
            # DeepSpeed's own code computes in place, and counts the updates of all that it was given.
            self._pieces = None if rule == CPU_ADAM else Pieces(self._optimizer, make)
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
            groups = _groups(record)
            since = _since(groups)
            for group, recorded in zip(self._optimizer.param_groups, groups, strict=True):
                group.update(recorded)
            if since != self._since:
                self._repeat_products(since)
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
            whole = [self._updated[name] for name in members if name in names]
            group["params"] = whole if self._pieces is None else self._pieces.of(whole, group)
        # Without the hooks that torch puts around it, for a script's own hooks are not of this optimizer.
        step = type(self._optimizer).step
        getattr(step, "__wrapped__", step)(self._optimizer)
        if self._pieces is not None:
            self._pieces.update_ended()

    def _repeat_products(self, since: int) -> None:
        """Bring the products of betas to where the training had them: the update `since` has taken the power."""
        most = updates_of(self._optimizer) + 1
        if not 0 <= since <= most:
            raise ValueError(f"its products of betas are from update {since}, and the next one is {most}")
        repeat_products(self._optimizer, since=since)
        self._since = since

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
            weight = read_later(stored["model", name].fragments, assignments)
            self._updated[name] = torch.nn.Parameter(weight, requires_grad=weight.is_floating_point())
            self._state[name] = {
                kind: read_later(stored[kind, name].fragments, assignments)
                for kind in self.kinds
                if (kind, name) in stored
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
        dtypes = {kind: _dtype_of(kind, flat, base, stored) for kind in (weights, *self.kinds)}
        if dtypes[weights] != flat.dtype:
            raise MismatchError(f"checkpoint {base} has {dtypes[weights]} {weights} weights, the redo log {flat.dtype}")
        tensors = {kind: torch.zeros(flat.shape, dtype=torch_dtype(dtype)) for kind, dtype in dtypes.items() if dtype}
        for kind, tensor in tensors.items():
            for part in flat.fragments:
                one = stored.get((kind, part.name))
                if one is None or part.start + part.numel > one.numel:
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
        from capture.loops.deepspeed.cpu_adam import RepeatedCPUAdam, compiled_code
    except ImportError as error:
        raise UnsupportedError(
            f"an update of {CPU_ADAM} is made again by DeepSpeed, which can't be imported here: {error}"
        ) from error
    flags = {name: rule[name] for name in ("adam_w_mode", "fp32_optimizer_states")}
    return partial(RepeatedCPUAdam, code=compiled_code(), **flags)


def _values(saved: Mapping[str, Any], name: str, group: int) -> dict[str, Any]:
    """Return the state of a tensor that is not stored as a tensor: its own, or that of its whole group."""
    shared = {key: values[group] for key, values in saved.get("state", {}).items() if values[group] is not None}
    own = saved.get("values", {}).get(name, {})
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in {**shared, **own}.items()
    }


def read_later(fragments: Sequence[Extent], assignments: list[Assignment]) -> torch.Tensor:
    """Return a tensor for all that the fragments of one hold, which is there once the assignments have been read."""
    tensor = torch.empty(fragments[0].shape, dtype=torch_dtype(fragments[0].dtype))
    assignments += assign(fragments, tensor, start=0, numel=tensor.numel())
    return tensor


def _dtype_of(kind: str, flat: RedoFlat, base: CheckpointRef, stored: Mapping[Key, StoredTensor]) -> str | None:
    """Return the dtype that all the parts of a flat tensor have of one kind; None where no parameter has that kind.
    MismatchError where they differ, because one tensor had them all."""
    if not flat.fragments and kind == kind_of(flat):
        return flat.dtype
    # Of one without fragments all is padding, which nothing reads.
    parts = {part.name for part in flat.fragments} or {name for _, name in stored}
    found = sorted({stored[kind, name].dtype for name in parts if (kind, name) in stored})
    if len(found) > 1 and flat.fragments:
        raise MismatchError(f"checkpoint {base} has {kind} of {' and '.join(found)}, the redo log in one tensor")
    return next(iter(found), None)


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


def _since(groups: Sequence[dict[str, Any]]) -> int:
    """Take from recorded param groups which update's products of betas theirs come from."""
    found = [group.pop(BIAS_CORRECTION_SINCE, 0) for group in groups]
    if not found or any(type(one) is not int or one != found[0] for one in found):
        raise FormatError(f"the products of betas of its param groups come from the updates {found}: they have one")
    since: int = found[0]
    return since


def no_entry(name: str) -> torch.Tensor:
    """Refuse a tensor that is not in the tree of an object itself."""
    raise FormatError(f"{name!r} is no tensor of a redo log")
