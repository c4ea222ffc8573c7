"""A checkpoint dictionary as data: a JSON tree and the tensors that it refers to, none of which is copied.

Tensors that share memory still share it when they are decoded: overlapping tensors become one entry, and each of them a
view of it. The tags extend those of `capture.state.objects`: ordered (an OrderedDict), scalar (of numpy), one tag for
each known class, and pickle, which exists only where both the saving and the loading side allow it.

Instances of known classes are found by their exact type when encoding and by their tag when decoding, so a file can't
name a class that is not listed here or by the caller.
"""

import argparse
import base64
import pathlib
import pickle as pickling
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from capture.state.dtypes import dtype_name
from capture.state.objects import Decoder, EncodedObject, Encoder
from catalog.errors import FormatError, UnsupportedError

__all__ = [
    "COMMON_CLASSES",
    "CheckpointTree",
    "KnownClass",
    "by_fields",
    "by_value",
    "decode_tree",
    "encode_tree",
]

_TO_SLASHES = re.compile(r"\['?(.*?)'?\]")


@dataclass(frozen=True, slots=True)
class KnownClass:
    """A class whose instances are stored as data.

    `take` returns plain data or further known instances. `make` is its inverse and runs no code that the file chooses.
    """

    tag: str
    cls: type
    take: Callable[[Any], Any]
    make: Callable[[Any], Any]


def by_fields(tag: str, cls: Any) -> KnownClass:
    """Make a KnownClass for a class whose instances consist of their `__dict__`."""

    def make(fields: dict[str, Any]) -> Any:
        # Neither `__init__` nor `__setstate__` is called: the file supplies values, never behaviour.
        made = cls.__new__(cls)
        made.__dict__.update(fields)
        return made

    return KnownClass(tag, cls, lambda instance: dict(vars(instance)), make)


def by_value(tag: str, cls: type[Enum]) -> KnownClass:
    """Make a KnownClass for an enumeration of plain values."""
    return KnownClass(tag, cls, lambda member: member.value, cls)


def _span(value: slice | range) -> list[Any]:
    return [value.start, value.stop, value.step]


COMMON_CLASSES = (
    KnownClass("size", torch.Size, list, torch.Size),
    KnownClass("set", set, list, set),
    KnownClass("frozenset", frozenset, list, frozenset),
    KnownClass("complex", complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    KnownClass("slice", slice, _span, lambda parts: slice(*parts)),
    KnownClass("range", range, _span, lambda parts: range(*parts)),
    KnownClass("bytearray", bytearray, bytes, bytearray),
    KnownClass("path", type(pathlib.Path()), str, pathlib.Path),
    KnownClass("torch_version", TorchVersion, str, TorchVersion),
    by_fields("argparse.Namespace", argparse.Namespace),
    by_fields("SimpleNamespace", SimpleNamespace),
)
"""The known classes of Python and torch."""


@dataclass(slots=True)
class CheckpointTree:
    """A JSON tree, and its tensors by entry name.

    The tensors are live references to the memory of the state, or copies where the elements of one are not dense there.
    """

    json: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def encode_tree(value: Any, *, known: Sequence[KnownClass], pickle: bool) -> CheckpointTree:
    """Encode `value`, whose tensors are referred to and not copied.

    An object that is neither data nor of a `known` class is pickled where `pickle` is true; otherwise UnsupportedError
    names its path.
    """
    encoder = _TreeEncoder(known, pickle=pickle)
    json = encoder.tree(value, "", 0)
    return CheckpointTree(json, _entries(encoder.leaves))


def decode_tree(
    json: Any,
    tensors: Mapping[str, torch.Tensor],
    *,
    what: str,
    known: Sequence[KnownClass],
    pickle: bool | Callable[[bytes], Any],
) -> Any:
    """Decode the JSON tree and the tensors of a CheckpointTree; the result refers to the memory of `tensors`.

    pickle: what becomes of a pickle: False refuses it, True unpickles it, which runs code that the file chooses, and a
    function is given its bytes and returns what stands in its place. FormatError, with the path below `what`, for a
    malformed part, an instance of a class that is not `known`, or a pickle that is refused.
    """
    unpickle = pickling.loads if pickle is True else pickle or None
    try:
        return _TreeDecoder(tensors, known, unpickle).value(json, what)
    except RecursionError as error:
        raise FormatError(f"object {what}: nested too deeply") from error


@dataclass(slots=True)
class _Leaf:
    """A tensor, and the node of the tree that is to refer to it.

    `begin` and `end` are the range of its storage, in elements, from its first element to behind its last.
    """

    tensor: torch.Tensor
    node: dict[str, Any]
    path: str

    @property
    def begin(self) -> int:
        return int(self.tensor.storage_offset())

    @property
    def end(self) -> int:
        reach = (step * (size - 1) for step, size in zip(self.tensor.stride(), self.tensor.shape, strict=True))
        return self.begin + 1 + sum(reach)

    @property
    def geometry(self) -> tuple[int, torch.Size, tuple[int, ...]]:
        return self.begin, self.tensor.shape, self.tensor.stride()


class _TreeEncoder(Encoder):
    def __init__(self, known: Sequence[KnownClass], *, pickle: bool) -> None:
        super().__init__(EncodedObject("state", b""))
        self.leaves: list[_Leaf] = []
        self._known = {one.cls: one for one in known}
        self._pickle = pickle

    def tree(self, value: Any, path: str, depth: int) -> Any:
        if type(value) is OrderedDict:
            return self._ordered(value, path, depth)
        known = self._known.get(type(value))
        if known is not None:
            return {"$": known.tag, "value": self.tree(known.take(value), path, depth + 1)}
        if isinstance(value, torch.Tensor):
            return self._node("tensor", value, path)
        if isinstance(value, np.generic):
            return {"$": "scalar", "array": self.tree(np.asarray(value), path, depth)}
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return self._array(value, path)
        # The base class would store any mapping as a dict and any float as a float. A checkpoint has to come back with
        # the types that it had, so subclasses are not data here.
        if isinstance(value, (Mapping, float)) and type(value) not in (dict, float):
            return self._other(value, path)
        try:
            return super().tree(value, path, depth)
        except UnsupportedError:
            # Raised for this value itself. What is inside a container has passed through here on its own and has been
            # pickled if that is allowed, so an error that comes out of a container is final.
            if isinstance(value, (list, tuple, dict)):
                raise
            return self._other(value, path)

    def _ordered(self, value: "OrderedDict[Any, Any]", path: str, depth: int) -> dict[str, Any]:
        node = {"$": "ordered", "items": self.mapping(value, path, depth)}
        if "_metadata" in vars(value):
            # Module.state_dict() keeps the versions of the layers' formats as an attribute of the dictionary, and
            # load_state_dict() needs them.
            node["metadata"] = self.tree(vars(value)["_metadata"], f"{path}._metadata", depth + 1)
        return node

    def _array(self, value: "np.ndarray[Any, Any]", path: str) -> dict[str, Any]:
        try:
            return self._node("ndarray", torch.from_numpy(np.array(value, order="C")), path)
        except TypeError as error:
            raise UnsupportedError(f"{path}: numpy dtype {value.dtype} can't be stored: convert it") from error

    def _node(self, tag: str, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        where = path or "the state"
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            raise UnsupportedError(
                f"{where}: a {type(tensor).__qualname__} of layout {tensor.layout} is not a dense tensor"
            )
        if tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise UnsupportedError(f"{where}: a meta, quantized or lazily conjugated tensor has no bytes of its own")
        dtype_name(tensor.dtype, what=where)
        node: dict[str, Any] = {"$": tag, "grad": True} if tensor.requires_grad else {"$": tag}
        self.leaves.append(_Leaf(tensor.detach(), node, path))
        return node

    def _other(self, value: Any, path: str) -> dict[str, Any]:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if not self._pickle:
            raise UnsupportedError(
                f"{path or 'the state'}: a {name} can't be stored as data: give its content as numbers, strings, "
                "lists, dicts or tensors, or call capture.checkpoint_engine(engine, pickle=True), here and where it is "
                "loaded"
            )
        return {"$": "pickle", "class": name, "base64": base64.b64encode(pickling.dumps(value)).decode()}


class _TreeDecoder(Decoder):
    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        known: Sequence[KnownClass],
        unpickle: Callable[[bytes], Any] | None,
    ) -> None:
        super().__init__(tensors.__getitem__)
        self._known = {one.tag: one for one in known}
        self._unpickle = unpickle

    def tagged(self, tree: dict[str, Any], path: str) -> Any:
        known = self._known.get(tree["$"])
        if known is not None:
            return known.make(self.value(tree["value"], path))
        match tree["$"]:
            case "tensor":
                return _view(self.stored_tensor(tree, path), tree)
            case "ordered":
                made = OrderedDict(self.value(tree["items"], path))
                if "metadata" in tree:
                    vars(made)["_metadata"] = self.value(tree["metadata"], path)
                return made
            case "scalar":
                return self.value(tree["array"], path)[()]
            case "pickle":
                if self._unpickle is None:
                    raise FormatError(
                        f"object {path}: a pickled {tree['class']}, and unpickling runs code that the file chooses: if "
                        "you trust it, load it with capture.checkpoint_engine(engine, pickle=True)"
                    )
                return self._unpickle(base64.b64decode(tree["base64"], validate=True))
        return super().tagged(tree, path)


def _view(entry: torch.Tensor, tree: dict[str, Any]) -> torch.Tensor:
    """Return a new tensor object over the memory of its entry."""
    view = tree.get("view")
    # as_strided refuses a view that reaches beyond the entry's storage, so a hostile file can't read other memory.
    tensor = entry.detach() if view is None else torch.as_strided(entry, view["shape"], view["stride"], view["begin"])
    return tensor.requires_grad_() if tree.get("grad") else tensor


def _entries(leaves: Sequence[_Leaf]) -> dict[str, torch.Tensor]:
    """Make one entry of each piece of memory, and let the nodes of its tensors refer to it by name."""
    tensors: dict[str, torch.Tensor] = {}
    for group in _overlapping(leaves):
        first = group[0]
        name = _name(first.path, tensors)
        span = max(leaf.end for leaf in group) - first.begin
        # An entry can be the tensor itself where all its tensors are that tensor, and its elements fill the memory that
        # they span; or where a single tensor has gaps, since nothing shares the gaps: then the elements are gathered.
        alike = all(leaf.geometry == first.geometry for leaf in group)
        has_gaps = len(group) == 1 and span > first.tensor.numel()
        plain = alike and (first.tensor.is_contiguous() or has_gaps)
        if plain:
            tensors[name] = first.tensor.contiguous()
        else:
            # Otherwise the entry is the whole span, and each tensor a view of it.
            tensors[name] = torch.as_strided(first.tensor, (span,), (1,), first.begin)
        for leaf in group:
            leaf.node["entry"] = name
            if not plain:
                shape, stride = list(leaf.tensor.shape), list(leaf.tensor.stride())
                leaf.node["view"] = {"shape": shape, "stride": stride, "begin": leaf.begin - first.begin}
    return tensors


def _overlapping(leaves: Sequence[_Leaf]) -> list[list[_Leaf]]:
    """Group tensors whose memory overlaps, directly or through others; the first of a group begins first."""
    groups: list[list[_Leaf]] = []
    storages: dict[Any, list[_Leaf]] = {}
    for leaf in leaves:
        if leaf.tensor.numel():
            storage = leaf.tensor.untyped_storage()
            # By dtype as well: one entry has one dtype. Tensors that see the same bytes as different dtypes are stored
            # apart.
            storages.setdefault((leaf.tensor.device, storage.data_ptr(), leaf.tensor.dtype), []).append(leaf)
        else:
            groups.append([leaf])
    for sharing in storages.values():
        end = -1
        for leaf in sorted(sharing, key=lambda leaf: leaf.begin):
            if leaf.begin < end:
                groups[-1].append(leaf)
            else:
                groups.append([leaf])
            end = max(end, leaf.end)
    return groups


def _name(path: str, taken: Mapping[str, torch.Tensor]) -> str:
    """Return the path with slashes between its keys, made unique among `taken`."""
    name = wanted = _TO_SLASHES.sub(r"/\1", path).lstrip("/") or "tensor"
    number = 1
    while name in taken:
        number += 1
        name = f"{wanted}#{number}"
    return name
