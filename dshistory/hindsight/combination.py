"""A weighted sum of checkpoints, tensor by tensor: computed in float64 and rounded once, to the dtype that is stored.

    the same tensor of every checkpoint, one checkpoint after another, in pieces  ->  a sum in float64  ->  its dtype

Beside the result this takes 8 bytes for each element of the largest tensor, and one piece of
`dshistory.tensors.stream`, however many checkpoints there are. A tensor whose bytes are equal in all is not computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Literal

import torch

from capture.state.dtypes import torch_dtype
from catalog.errors import MismatchError, SetupError
from catalog.history import History
from catalog.read.fragments import StoredTensor
from catalog.records import CheckpointRef
from dshistory.display.progress import ByteProgress
from dshistory.patterns import Patterns, matching
from dshistory.tensors.checkpoint_tensors import CheckpointTensors
from dshistory.tensors.stream import FragmentStream, Held, read_small

__all__ = ["Combination", "Term", "combine"]

_CHUNK_NUMEL: Final = 1 << 20
_SHOWN: Final = 3
_WITH_BUFFERS: Final = frozenset({"model", "master"})
"""Weights of these kinds mean little without the persistent buffers of their step."""

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Term:
    """One checkpoint of a sum, with its weight."""

    ref: CheckpointRef
    weight: float


@dataclass
class Combination:
    """The tensors of a sum by kind and first name, and the further names of each."""

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    aliases: dict[Key, tuple[str, ...]] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    """The tensors of whole numbers that differ between the checkpoints: they are those of the last one."""


def combine(
    history: History,
    terms: Sequence[Term],
    *,
    of: Literal["values", "differences"],
    kinds: Patterns,
    names: Patterns,
    verb: str,
    quiet: bool,
) -> Combination:
    """Return the weighted sum of the tensors of several checkpoints.

    of: "values" for weights whose sum is 1: a tensor that is equal in all checkpoints stays as it is, and one of whole
        numbers or truth values is that of the last; "differences" for weights whose sum is 0: equal tensors give zeros,
        and tensors of whole numbers are left out.

    MismatchError names a tensor that one of the checkpoints does not have, or has in another shape; SetupError what is
    not finite, with the checkpoint where it is not; NotFoundError a pattern that fits nothing.
    """
    refs = [term.ref for term in terms]
    sides = _sides(history, refs, kinds, names)
    _require_same(sides, refs, verb)
    made, problems = Combination(), list[str]()
    total = sum(tensor.nbytes for tensor in chain.from_iterable(side.values() for side in sides))
    with ByteProgress(total, description=f"{verb} {refs[0]} to {refs[-1]}", quiet=quiet) as bar:
        for key, last in sides[-1].items():
            tensors = [side[key] for side in sides]
            equal = all(tensor.same_bytes(last) for tensor in tensors)
            if not torch_dtype(last.dtype).is_floating_point:
                if of == "differences":
                    continue
                made.taken += [] if equal else [last.name]
            if equal or not torch_dtype(last.dtype).is_floating_point:
                result = _copied(history, last, zero=of == "differences")
            else:
                result, guilty = _summed(history, tensors, terms)
                broken = _not_finite_in(result)
                problems += [_not_finite(last, broken, guilty)] if broken else []
            made.tensors.setdefault(last.kind, {})[last.name] = result
            made.aliases[key] = last.aliases
            bar.advance(sum(tensor.nbytes for tensor in tensors))
    if problems:
        more = f"; and {len(problems) - _SHOWN} more tensors" if problems[_SHOWN:] else ""
        raise SetupError(f"{verb}: the result is not finite: {'; '.join(problems[:_SHOWN])}{more}")
    return made


def _sides(
    history: History, refs: Sequence[CheckpointRef], kinds: Patterns, names: Patterns
) -> list[dict[Key, StoredTensor]]:
    """Return, for each checkpoint, its tensors that are asked for, and the persistent buffers that belong to them."""
    where = " and ".join(map(str, refs)) if len(refs) <= 2 else f"{refs[0]} to {refs[-1]} ({len(refs)} checkpoints)"
    stored = [CheckpointTensors(history, ref, advance=lambda nbytes: None) for ref in refs]
    wanted = matching({kind for one in stored for kind, _ in one.tensors}, kinds, what="kind", where=where)
    wanted |= {"buffer"} if wanted & _WITH_BUFFERS else set()
    sides = [
        {
            (kind, name): tensor
            for (kind, name), tensor in one.tensors.items()
            if kind in wanted and (kind != "buffer" or name in one.buffers)
        }
        for one in stored
    ]
    known = {name for side in sides for tensor in side.values() for name in (tensor.name, *tensor.aliases)}
    fitting = matching(known, names, what="tensor", where=where)
    return [
        {key: tensor for key, tensor in side.items() if not fitting.isdisjoint((tensor.name, *tensor.aliases))}
        for side in sides
    ]


def _require_same(sides: Sequence[dict[Key, StoredTensor]], refs: Sequence[CheckpointRef], verb: str) -> None:
    last, last_ref = sides[-1], refs[-1]
    for side, ref in zip(sides[:-1], refs[:-1], strict=True):
        for kind, name in sorted(side.keys() ^ last.keys()):
            there, lacking = (last_ref, ref) if (kind, name) in last else (ref, last_ref)
            raise MismatchError(
                f"{verb}: {kind} {name!r} is in checkpoint {there} and not in {lacking}: leave one of the two out, or "
                "choose the tensors that all have with names="
            )
        for (kind, name), tensor in last.items():
            if side[kind, name].shape != tensor.shape:
                raise MismatchError(
                    f"{verb}: {kind} {name!r} has shape {side[kind, name].shape} in checkpoint {ref} and "
                    f"{tensor.shape} in {last_ref}: leave one of the two out, or this tensor, with names="
                )


def _copied(history: History, tensor: StoredTensor, *, zero: bool) -> torch.Tensor:
    made = torch.zeros(tensor.shape, dtype=torch_dtype(tensor.dtype))
    if not zero:
        flat, at = made.view(-1), 0
        stream = FragmentStream(history.root, tensor)
        while numel := stream.ready():
            flat[at : at + numel] = stream.take(numel)
            at += numel
    return made


def _summed(
    history: History, tensors: Sequence[StoredTensor], terms: Sequence[Term]
) -> tuple[torch.Tensor, list[CheckpointRef]]:
    """Return the sum of weight times tensor, in the order of the terms, and the checkpoints that are not finite."""
    last = tensors[-1]
    total = torch.zeros(last.numel, dtype=torch.float64)
    guilty = []
    held = read_small(history.root, tensors)
    for tensor, term in zip(tensors, terms, strict=True):
        if not _add(history, tensor, term.weight, total, held):
            guilty.append(term.ref)
    return total.to(torch_dtype(last.dtype)).view(last.shape), guilty


def _add(history: History, tensor: StoredTensor, weight: float, total: torch.Tensor, held: Held) -> bool:
    """Add weight times tensor to the sum; return whether all of the tensor is finite."""
    stream, at, finite = FragmentStream(history.root, tensor, held=held), 0, True
    while ready := stream.ready():
        chunk = stream.take(min(ready, _CHUNK_NUMEL)).double()
        finite = finite and math.isfinite(float(chunk.sum()))
        total[at : at + chunk.numel()] += chunk * weight
        at += chunk.numel()
    return finite


def _not_finite_in(tensor: torch.Tensor) -> int:
    """Return how many elements are not finite. float8 has no such test, so chunks are looked at in float64."""
    chunks = torch.split(tensor.view(-1), _CHUNK_NUMEL)
    return sum(chunk.numel() - int(chunk.double().isfinite().sum()) for chunk in chunks)


def _not_finite(tensor: StoredTensor, broken: int, guilty: Sequence[CheckpointRef]) -> str:
    who = f"in checkpoint {guilty[0]} they are not either: leave it out" if guilty else f"too large for {tensor.dtype}"
    return f"{broken} of {tensor.numel} elements of {tensor.kind} {tensor.name!r} ({who})"
