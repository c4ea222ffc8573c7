"""A whole checkpoint dictionary as data: a JSON tree, and beside it the tensors it refers to, none of them copied.

Tensors that share memory go on sharing it: what overlaps is one entry, of which each tensor is a view. On top of the tags of
`objects`: ordered (a dictionary), the tags of known classes, scalar (of numpy), and pickle, which exists only where both sides ask for it.
"""

import base64
import pickle as pickling
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from capture.deepspeed_checkpoints.known_classes import KnownClass
from capture.state.dtypes import dtype_name
from capture.state.objects import Decoder, EncodedObject, Encoder
from catalog.errors import FormatError, UnsupportedError

__all__ = ["StateTree", "decode_state", "encode_state"]

_TO_SLASHES = re.compile(r"\['?(.*?)'?\]")


@dataclass(slots=True)
class StateTree:
    """JSON for `tree`, and its tensors by entry name: live references, or copies where a tensor is not dense."""

    tree: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def encode_state(value: Any, *, known: Sequence[KnownClass], pickle: bool) -> StateTree:
    """`value` as it is now. UnsupportedError names the path of what is no data; with `pickle` that is pickled."""
    encoder = _StateEncoder(known, pickle=pickle)
    tree = encoder.tree(value, "", 0)
    return StateTree(tree, _entries(encoder.leaves))


def decode_state(
    tree: Any, tensors: Mapping[str, torch.Tensor], *, what: str, known: Sequence[KnownClass], pickle: bool
) -> Any:
    """The inverse. FormatError names what is malformed, of a class that is not known, or pickled without `pickle`."""
    try:
        return _StateDecoder(tensors, known, pickle=pickle).value(tree, what)
    except RecursionError as error:
        raise FormatError(f"object {what}: nested too deeply") from error


@dataclass(slots=True)
class _Leaf:
    """A tensor, and the node of the tree that shall refer to it."""

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


class _StateEncoder(Encoder):
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
        if isinstance(value, (Mapping, float)) and type(value) not in (dict, float):
            return self._other(value, path)
        try:
            return super().tree(value, path, depth)
        except UnsupportedError:
            # Of this very value: what lies in a container has been through here by itself.
            if isinstance(value, (list, tuple, dict)):
                raise
            return self._other(value, path)

    def _ordered(self, value: "OrderedDict[Any, Any]", path: str, depth: int) -> dict[str, Any]:
        node = {"$": "ordered", "items": self.mapping(value, path, depth)}
        if "_metadata" in vars(value):
            # What a module's state_dict says of the versions of its layers is an attribute of the dictionary.
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
                f"{where}: a {type(tensor).__qualname__} of layout {tensor.layout} is no dense tensor"
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
                f"{path or 'the state'}: a {name} can't be stored as data: give its content as numbers, strings, lists, dicts or "
                "tensors, or call capture.checkpoint_engine(engine, pickle=True), here and where it is loaded"
            )
        return {"$": "pickle", "class": name, "base64": base64.b64encode(pickling.dumps(value)).decode()}


class _StateDecoder(Decoder):
    def __init__(self, tensors: Mapping[str, torch.Tensor], known: Sequence[KnownClass], *, pickle: bool) -> None:
        super().__init__(tensors.__getitem__)
        self._known = {one.tag: one for one in known}
        self._pickle = pickle

    def tagged(self, tree: dict[str, Any], path: str) -> Any:
        known = self._known.get(tree["$"])
        if known is not None:
            return known.make(self.value(tree["value"], path))
        match tree["$"]:
            case "tensor":
                return _seen(self.stored_tensor(tree, path), tree)
            case "ordered":
                made = OrderedDict(self.value(tree["items"], path))
                if "metadata" in tree:
                    vars(made)["_metadata"] = self.value(tree["metadata"], path)
                return made
            case "scalar":
                return self.value(tree["array"], path)[()]
            case "pickle":
                if not self._pickle:
                    raise FormatError(
                        f"object {path}: a pickled {tree['class']}, and unpickling runs code that the file chooses: if you trust it, "
                        "load it with capture.checkpoint_engine(engine, pickle=True)"
                    )
                return pickling.loads(base64.b64decode(tree["base64"], validate=True))
        return super().tagged(tree, path)


def _seen(held: torch.Tensor, tree: dict[str, Any]) -> torch.Tensor:
    """A tensor object of its own, over the memory of its entry."""
    view = tree.get("view")
    tensor = held.detach() if view is None else torch.as_strided(held, view["shape"], view["stride"], view["begin"])
    return tensor.requires_grad_() if tree.get("grad") else tensor


def _entries(leaves: Sequence[_Leaf]) -> dict[str, torch.Tensor]:
    """Name every piece of memory, once, and let the nodes of its tensors refer to it."""
    tensors: dict[str, torch.Tensor] = {}
    for group in _overlapping(leaves):
        first = group[0]
        name = _name(first.path, tensors)
        span = max(leaf.end for leaf in group) - first.begin
        alike = all(leaf.geometry == first.geometry for leaf in group)
        gappy = len(group) == 1 and span > first.tensor.numel()
        plain = alike and (first.tensor.is_contiguous() or gappy)
        if plain:
            tensors[name] = first.tensor.contiguous()
        else:
            tensors[name] = torch.as_strided(first.tensor, (span,), (1,), first.begin)
        for leaf in group:
            leaf.node["entry"] = name
            if not plain:
                shape, stride = list(leaf.tensor.shape), list(leaf.tensor.stride())
                leaf.node["view"] = {"shape": shape, "stride": stride, "begin": leaf.begin - first.begin}
    return tensors


def _overlapping(leaves: Sequence[_Leaf]) -> list[list[_Leaf]]:
    """Tensors whose memory overlaps together, each group by its begin."""
    groups: list[list[_Leaf]] = []
    homes: dict[Any, list[_Leaf]] = {}
    for leaf in leaves:
        if leaf.tensor.numel():
            storage = leaf.tensor.untyped_storage()
            homes.setdefault((leaf.tensor.device, storage.data_ptr(), leaf.tensor.dtype), []).append(leaf)
        else:
            groups.append([leaf])
    for home in homes.values():
        end = -1
        for leaf in sorted(home, key=lambda leaf: leaf.begin):
            if leaf.begin < end:
                groups[-1].append(leaf)
            else:
                groups.append([leaf])
            end = max(end, leaf.end)
    return groups


def _name(path: str, taken: Mapping[str, torch.Tensor]) -> str:
    """The path with slashes, made unique."""
    name = wanted = _TO_SLASHES.sub(r"/\1", path).lstrip("/") or "tensor"
    number = 1
    while name in taken:
        number += 1
        name = f"{wanted}#{number}"
    return name
