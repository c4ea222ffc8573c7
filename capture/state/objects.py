"""Python objects as data: a JSON tree whose tensors are extents of their own. Nothing is ever pickled or unpickled.

JSON's own values stand for themselves; everything else is `{"$": tag, ...}`: tuple, bytes, dict (keys that are no strings, or a key "$"), float (NaN and
infinities, as hex), tensor and ndarray (by the name of their extent, or with dtype, shape and bytes), dtype, device. Anything else is refused by its
path in the object.
"""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import torch

from capture.state.dtypes import dtype_name, torch_dtype
from catalog.errors import FormatError, UnsupportedError
from catalog.format.dtypes import DTYPES

__all__ = ["Decoder", "EncodedObject", "Encoder", "decode_object", "encode_object", "inlined"]

_MAX_DEPTH = 200


@dataclass(slots=True)
class EncodedObject:
    """An object's JSON and its tensors by extent name: private contiguous copies in host memory, taken when it was
    encoded.
    """

    name: str
    json: bytes
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def encode_object(name: str, value: Any) -> EncodedObject:
    """Encode `value` as it is now. UnsupportedError names the path of what can't be stored as data."""
    encoded = EncodedObject(name, b"")
    tree = Encoder(encoded).tree(value, name, 0)
    encoded.json = json.dumps(tree, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return encoded


def decode_object(name: str, data: bytes, *, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The object of `data`; `tensor` gives the tensor of an extent name. FormatError names what is malformed."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"object {name!r}: not readable as JSON: {error}") from error
    return Decoder(tensor).value(tree, name)


def inlined(encoded: EncodedObject) -> EncodedObject:
    """The same object with its tensors inside its JSON: for a header that has no room for their names."""
    tree = _with_data(json.loads(encoded.json), encoded.tensors)
    return EncodedObject(encoded.name, json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode())


def _with_data(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_with_data(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("$") not in ("tensor", "ndarray"):
        return {key: _with_data(item, tensors) for key, item in tree.items()}
    tensor = tensors[tree["entry"]]
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return {
        "$": tree["$"],
        "dtype": dtype_name(tensor.dtype, what=tree["entry"]),
        "shape": list(tensor.shape),
        "base64": base64.b64encode(data).decode(),
    }


class Encoder:
    """Values to trees. A subclass that knows more classes overrides `tree`, one that keeps tensors elsewhere `tensor`."""

    def __init__(self, encoded: EncodedObject) -> None:
        self._encoded = encoded

    def tree(self, value: Any, path: str, depth: int) -> Any:
        """The JSON of `value`, which is found at `path`."""
        if depth > _MAX_DEPTH:
            raise UnsupportedError(f"{path}: nested deeper than {_MAX_DEPTH} levels, or containing itself")
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float):
            return float(value) if isfinite(value) else {"$": "float", "hex": float(value).hex()}
        if type(value) is list:
            return [self.tree(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        if type(value) in (tuple, torch.Size):
            return {"$": "tuple", "items": [self.tree(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]}
        if isinstance(value, Mapping):
            return self.mapping(value, path, depth)
        return self._leaf(value, path)

    def mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        """The JSON of a dictionary, its order kept."""
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: self.tree(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
        pairs = [
            [self.tree(key, f"{path} (a key)", depth + 1), self.tree(item, f"{path}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {"$": "dict", "items": pairs}

    def _leaf(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return {"$": "tensor", **self.tensor(value.detach().to("cpu", copy=True).contiguous(), path)}
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.hasobject is False:
            array = np.array(value, order="C")
            try:
                return {"$": "ndarray", **self.tensor(torch.from_numpy(array), path)}
            except TypeError as error:
                raise UnsupportedError(f"{path}: numpy dtype {array.dtype} can't be stored: convert it") from error
        if type(value) in (bytes, bytearray):
            return {"$": "bytes", "base64": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"$": "dtype", "name": dtype_name(value, what=path)}
        if isinstance(value, torch.device):
            return {"$": "device", "name": str(value)}
        raise UnsupportedError(
            f"{path}: a {type(value).__module__}.{type(value).__qualname__} can't be stored as data: keep it out of the state, "
            "or give its content as numbers, strings, lists, dicts or tensors"
        )

    def tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        """Keep a private contiguous host tensor; how the tree refers to it."""
        entry = f"{self._encoded.name}/{len(self._encoded.tensors)}"
        dtype_name(tensor.dtype, what=path)
        self._encoded.tensors[entry] = tensor
        return {"entry": entry}


class Decoder:
    """Trees to values. A subclass that knows more tags overrides `tagged`."""

    def __init__(self, tensor: Callable[[str], torch.Tensor]) -> None:
        self._tensor = tensor

    def value(self, tree: Any, path: str) -> Any:
        """What `tree` stands for."""
        if isinstance(tree, list):
            return [self.value(item, f"{path}[{i}]") for i, item in enumerate(tree)]
        if not isinstance(tree, dict):
            return tree
        if "$" not in tree:
            return {key: self.value(item, f"{path}[{key!r}]") for key, item in tree.items()}
        try:
            return self.tagged(tree, path)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"object {path}: malformed {tree.get('$')!r}: {error}") from error

    def tagged(self, tree: dict[str, Any], path: str) -> Any:
        """What a tree with a tag stands for."""
        match tree["$"]:
            case "tuple":
                return tuple(self.value(item, f"{path}[{i}]") for i, item in enumerate(tree["items"]))
            case "dict":
                return {self.value(key, path): self.value(item, f"{path}[{key!r}]") for key, item in tree["items"]}
            case "float":
                return float.fromhex(tree["hex"])
            case "bytes":
                return base64.b64decode(tree["base64"], validate=True)
            case "tensor":
                return self.held(tree, path)
            case "ndarray":
                return self.held(tree, path).numpy()
            case "dtype":
                return _dtype(tree["name"], path)
            case "device":
                return torch.device(tree["name"])
            case tag:
                raise FormatError(f"object {path}: the tag {tag!r} is not known to this release")

    def held(self, tree: dict[str, Any], path: str) -> torch.Tensor:
        """A tensor that has an extent of its own, or lies in the JSON."""
        if "entry" in tree:
            return self._tensor(tree["entry"])
        dtype, data = _dtype(tree["dtype"], path), bytearray(base64.b64decode(tree["base64"], validate=True))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.view(tree["shape"])


def _dtype(name: Any, path: str) -> torch.dtype:
    if name not in DTYPES:
        raise FormatError(f"object {path}: dtype {name!r} is not one of {', '.join(DTYPES)}")
    return torch_dtype(name)
