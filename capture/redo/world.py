"""The state of all ranks of a training after each update that is made again: one process makes the updates of all.

Each rank of ZeRO updates its own parts of the parameters, from its own log. What all ranks have alike the first one
updates. Buffers and generators are each rank's own.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch

from capture.load.objects import read_objects
from capture.redo.updates import Key, RepeatedUpdates, elements_of, kind_of, no_entry, optimizer_of
from capture.state.dtypes import torch_dtype
from capture.state.objects import decode_object
from capture.state.update_rule import threads_of
from catalog.errors import FormatError, MismatchError, UnsupportedError
from catalog.format.redo_segment import RedoFlat, RedoFragment, RedoTensor
from catalog.history import History
from catalog.read.fragments import StoredTensor, choose
from catalog.read.redo import RedoRecord
from catalog.read.redo_allowance import Form, RedoAllowance, require_fitting_flats
from catalog.records import CheckpointRef

__all__ = ["RepeatedSteps"]


class _RecordedObjects(Mapping[str, Any]):
    """The objects of a step that is made again, of which some are named and not known."""

    def __init__(self, known: Mapping[str, Any], *, too_large: Collection[str], what: str) -> None:
        self._known = known
        self._too_large = too_large
        self._what = what

    def __getitem__(self, name: str) -> Any:
        if name in self._too_large:
            raise UnsupportedError(
                f"{self._what}: the object {name!r} was too large for the redo log, so no training can go on from this "
                "step: restore it without a target, or a checkpoint"
            )
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._known, **dict.fromkeys(self._too_large)})

    def __len__(self) -> int:
        return len({*self._known, *self._too_large})


class RepeatedSteps:
    """The state after `base`, and after each step whose records are applied.

    stored: the tensors of `base`
    first: the records of the step after it, of all ranks
    """

    def __init__(
        self, history: History, base: CheckpointRef, stored: Mapping[Key, StoredTensor], first: Sequence[RedoRecord]
    ) -> None:
        self._what = f"run {base.run}"
        extents = history.extents(base, kinds=("object", "object_tensor"))
        self._own_objects = {extent.name for extent in extents if extent.placement == "rank_local"}
        self._saved = [read_objects(history.root, choose(extents, rank=rank)) for rank in range(len(first))]
        saved = optimizer_of(self._saved[0], base)
        flats = [record.segment.writes.flats for record in first]
        are_parted = any(flat.placement == "partitioned" for of_rank in flats for flat in of_rank)
        self._weights = {name: one for (kind, name), one in stored.items() if kind == "model"}
        updating = first[: None if are_parted else 1]
        require_fitting_flats(
            chain.from_iterable(flats[: len(updating)]),
            elements=sum(weight.numel for weight in self._weights.values()),
            where=f"the redo log of {self._what}",
        )
        self._updates = [RepeatedUpdates(history, base, stored, saved, record) for record in updating]
        self._rounded = _whole_parameters(flats[: len(self._updates)], self._weights, base)
        _require_all(saved, self._rounded or {*chain.from_iterable(first[0].segment.writes.params)}, base)
        self.kinds = self._updates[0].kinds | {kind_of(flat) for flat in flats[0]}
        self._buffers: list[dict[str, torch.Tensor]] = [{} for _ in first]
        self._objects: list[dict[str, bytes]] = [{} for _ in first]
        self._tensors: dict[Key, torch.Tensor] | None = None
        self._has_updated = False
        self._memory: dict[tuple[int, str], bytearray] = {}
        self._wholes: dict[Key, torch.Tensor] = {}
        buffer_bytes = sum(buffer.nbytes for (kind, _), buffer in stored.items() if kind == "buffer")
        self._allowances = [
            RedoAllowance(self._forms(record.segment.writes.flats), buffer_bytes=buffer_bytes) for record in first
        ]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._buffers)

    def apply(self, records: Sequence[RedoRecord]) -> None:
        """Make the update of the next step. CorruptError, which names the tensor, for damaged bytes; FormatError for
        what no training would have recorded."""
        if len(records) != self.world_size:
            raise MismatchError(f"{self._what}: its redo log has {self.world_size} ranks, and then {len(records)}")
        self._tensors = None
        self._has_updated |= records[0].content.applied
        for rank, record in enumerate(records):
            gradients = self._take(rank, record)
            if rank < len(self._updates):
                with threads_of(record.rule):
                    self._updates[rank].apply(record, gradients)
            elif gradients:
                raise FormatError(f"{record.segment.path}: step {record.step}: has gradients of what rank 0 updates")

    def objects(self, rank: int) -> Mapping[str, Any]:
        """Return the objects that a rank has at the step, by name: those of the checkpoint, and instead of them what
        was recorded since. A rank that the training did not have gets those of the first one. One that was too large to
        be recorded raises UnsupportedError when it is looked up.
        """
        rank = rank if rank < self.world_size else 0
        own = self._own_objects.union(*self._objects[1:])
        common = {name: text for name, text in self._objects[0].items() if rank == 0 or name not in own}
        found = {**common, **self._objects[rank]}
        too_large = {name for name, text in found.items() if not text}
        recorded = {name: decode_object(name, text, tensor=no_entry) for name, text in found.items() if text}
        return _RecordedObjects({**self._saved[rank], **recorded}, too_large=too_large, what=self._what)

    def buffers(self, rank: int) -> Mapping[str, torch.Tensor]:
        """Return the buffers of a rank that have changed so far."""
        return self._buffers[rank]

    def tensors(self) -> Mapping[Key, torch.Tensor]:
        """Return what the updates have made so far, in whole: parameters, master weights and optimizer state. They may
        be the memory that the next update writes."""
        if self._tensors is None:
            self._tensors = dict(self._updates[0].tensors()) if not self._rounded else self._put_together()
        return self._tensors

    def _take(self, rank: int, record: RedoRecord) -> dict[str, torch.Tensor]:
        """Keep the objects and buffers of a record; return its gradients by name."""
        self._allowances[rank].admit(record)
        gradients = {}
        for tensor, content in record.tensors(partial(self._memory_of, rank)):
            if tensor.kind == "object":
                self._objects[rank][tensor.name] = bytes(content)
            elif tensor.kind == "buffer":
                self._buffers[rank][tensor.name] = elements_of(tensor, content)
            else:
                gradients[tensor.name] = elements_of(tensor, content)
        return gradients

    def _memory_of(self, rank: int, tensor: RedoTensor, nbytes: int) -> bytearray:
        """Return memory for a recorded tensor: that of a gradient again at each step, because the update of the step
        before has been made, and new memory costs as much time as unpacking."""
        if tensor.kind != "gradient":
            return bytearray(nbytes)
        found = self._memory.get((rank, tensor.name))
        if found is None or len(found) != nbytes:
            found = self._memory[rank, tensor.name] = bytearray(nbytes)
        return found

    def _forms(self, flats: Sequence[RedoFlat]) -> dict[str, Form]:
        """Return the dtype and shape of the gradient of each tensor that updates write, flat or a parameter."""
        if flats:
            return {flat.name: (flat.dtype, flat.shape) for flat in flats}
        return {name: (weight.dtype, weight.shape) for name, weight in self._weights.items()}

    def _put_together(self) -> dict[Key, torch.Tensor]:
        found: dict[Key, torch.Tensor] = {}
        known: Counter[Key] = Counter()
        for updates in self._updates:
            for kind, part, elements in updates.parts():
                key, shape = (kind, part.name), self._weights[part.name].shape
                known[key] += part.numel
                if key not in found and part.numel == prod(shape):
                    found[key] = elements.view(shape)
                    continue
                if key not in found:
                    found[key] = self._whole_of(key, shape, elements.dtype)
                found[key].view(-1)[part.start : part.start + part.numel] = elements
        for (kind, name), tensor in found.items():
            if known[kind, name] != tensor.numel():
                raise MismatchError(
                    f"{self._what}: its redo log makes {known[kind, name]} of the {tensor.numel()} elements of {kind} "
                    f"{name!r}: the logs of its ranks do not belong together"
                )
        for name, dtype in self._rounded.items():
            if self._has_updated and ("master", name) in found:
                # As the optimizer derives the weights from the masters behind each update, and before the first one
                # they are what the checkpoint has, which need not be that.
                master = found["master", name]
                found["model", name] = self._whole_of(("model", name), master.shape, dtype).copy_(master)
        return found

    def _whole_of(self, key: Key, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a whole tensor, that of the step before again, as for gradients."""
        if key not in self._wholes:
            self._wholes[key] = torch.empty(shape, dtype=dtype)
        return self._wholes[key]


def _require_all(saved: Mapping[str, Any], updated: Collection[str], base: CheckpointRef) -> None:
    """Raise MismatchError unless the log updates every parameter that the optimizer of `base` does."""
    missing = sorted({str(name) for group in saved["groups"] for name in group["params"]} - set(updated))
    if missing:
        raise MismatchError(
            f"the redo log of run {base.run} does not update {missing[0]!r}, and the optimizer of {base} does: the "
            "logs of its ranks do not belong together"
        )


def _whole_parameters(
    ranks: Sequence[Sequence[RedoFlat]], weights: Mapping[str, StoredTensor], base: CheckpointRef
) -> dict[str, torch.dtype]:
    """Return the parameters of which the flat tensors of all ranks hold every element once, with the model's dtype of
    each. MismatchError where they do not: nothing would tell what the rest is."""
    parts: dict[str, list[RedoFragment]] = {}
    for part in (part for flats in ranks for flat in flats for part in flat.fragments):
        parts.setdefault(part.name, []).append(part)
    for name, fragments in parts.items():
        end = 0
        for part in sorted(fragments, key=lambda one: one.start):
            end = part.start + part.numel if part.start == end else -1
        if name not in weights or end != weights[name].numel:
            raise MismatchError(
                f"the redo log of run {base.run} does not update every element of {name!r} of {base} once: the logs of "
                "its ranks do not belong together"
            )
    return {name: torch_dtype(weights[name].dtype) for name in parts}
