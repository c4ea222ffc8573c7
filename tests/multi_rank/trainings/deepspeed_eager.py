"""A reference for DeepSpeed checkpoints: eager copies of everything that providers list, and their restore in memory.

It uses the providers' own prepare and finish, but no writer, plan or file, so it tests addressing and restoring alone.
A checkpoint must equal such a copy.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from capture.loops.deepspeed.loop import DeepSpeedLoop
from capture.state.interface import Available, StateProvider
from capture.state.providers import RandomState

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


@dataclass(frozen=True)
class Eager:
    """The logical tensors, combined over all ranks (rank-local tensors: of this rank), and the objects of this rank."""

    tensors: dict[tuple[str, str], torch.Tensor]
    objects: dict[str, Any]

    def available(self) -> Available:
        kinds = {key: (tuple(tensor.shape), NAMES[tensor.dtype]) for key, tensor in self.tensors.items()}
        return Available(kinds, copy.deepcopy(self.objects))

    def without_buffers(self) -> "Eager":
        """Return the state that must not change between two updates."""
        return Eager({key: tensor for key, tensor in self.tensors.items() if key[0] != "buffer"}, self.objects)


def providers(engine: Any) -> list[StateProvider]:
    """Return the State Providers of an engine, and that of this process's random numbers."""
    return [*DeepSpeedLoop(engine).providers(), RandomState()]


def take(providers: Sequence[StateProvider]) -> Eager:
    """Copy all state.

    The fragments of every tensor must cover it completely, and exactly once unless it is replicated.
    """
    mine = []
    for provider in providers:
        for item in provider.tensors():
            flat = item.tensor.detach().clone().reshape(-1)
            mine.append((item.kind, item.name, item.shape, item.start, item.placement, flat))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [part for part in mine if part[4] != "rank_local"])
    everyone.append([part for part in mine if part[4] == "rank_local"])
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    seen: dict[tuple[str, str], torch.Tensor] = {}
    for kind, name, shape, start, placement, flat in (part for parts in everyone for part in parts):
        key, numel = (kind, name), torch.Size(shape).numel()
        whole = tensors.setdefault(key, torch.zeros(numel, dtype=flat.dtype))
        count = seen.setdefault(key, torch.zeros(numel, dtype=torch.int32))
        if placement == "partitioned":
            assert not count[start : start + len(flat)].any(), f"{key} overlaps at {start}"
            whole[start : start + len(flat)] = flat
        else:
            same = torch.equal(whole.view(torch.uint8), flat.view(torch.uint8))
            assert not count.any() or same, f"{key} differs between ranks"
            whole.copy_(flat)
        count[start : start + len(flat)] += 1
        tensors[key] = whole
    for key, count in seen.items():
        assert bool(count.bool().all()), f"{key} has holes"
    shapes = {(kind, name): shape for kind, name, shape, *_ in (part for parts in everyone for part in parts)}
    objects = {name: copy.deepcopy(value) for p in providers for name, (value, _) in p.objects().items()}
    return Eager({key: tensor.reshape(shapes[key]) for key, tensor in tensors.items()}, objects)


def state_of(engine: Any) -> Eager:
    """Copy all state of an engine, and of the random numbers of this process."""
    return take(providers(engine))


def put_back(providers: Sequence[StateProvider], eager: Eager) -> None:
    """Restore the copy in memory."""
    available = eager.available()
    for provider in providers:
        provider.prepare(available)
    for provider in providers:
        for item in provider.tensors():
            stored = eager.tensors.get((item.kind, item.name))
            if stored is None and item.kind == "master":
                stored = eager.tensors[("model", item.name)]
            assert stored is not None, f"nothing stored for {item.kind}/{item.name}"
            assert stored.dtype == item.tensor.dtype, (
                f"{item.kind}/{item.name}: {stored.dtype} into {item.tensor.dtype}"
            )
            item.tensor.view(-1).copy_(stored.reshape(-1)[item.start : item.start + item.tensor.numel()])
    for provider in providers:
        provider.finish(available)


def assert_same(one: Eager, other: Eager) -> None:
    """Assert that both are equal bit for bit, NaN included."""
    assert one.tensors.keys() == other.tensors.keys(), one.tensors.keys() ^ other.tensors.keys()
    for key, tensor in one.tensors.items():
        a, b = tensor.reshape(-1).view(torch.uint8), other.tensors[key].reshape(-1).view(torch.uint8)
        assert torch.equal(a, b), f"{key} differs"
