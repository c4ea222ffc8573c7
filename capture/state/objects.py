"""Python objects as data: a JSON tree, whose tensors are stored as separate extents. Nothing is pickled or unpickled.

JSON's own values represent themselves. Everything else is a JSON object with a tag, `{"$": tag, ...}`. The tags are:
  - tuple, bytes, dtype, device;
  - dict: a dictionary with keys that are not strings, or with a key "$";
  - float: NaN and the infinities, as hex;
  - tensor, ndarray: by the name of an extent, or with dtype, shape and bytes in the JSON itself.
A value of any other class is refused, and the error names its path in the object.
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
from capture.state.tensor_names import tensor_names
from catalog.errors import FormatError, UnsupportedError
from catalog.format.dtypes import DTYPES

__all__ = [
    "Decoder",
    "EncodedObject",
    "Encoder",
    "LiveTensor",
    "decode_object",
    "encode_object",
    "have_same_content",
    "inlined",
]

_MAX_DEPTH = 200

MOST_COPIED_BYTES = 1 << 20
"""The tensors of a live object are copied up to so many bytes: the rest stays where it is."""

_SCALARS = {type(None), bool, int, str}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True, eq=False)
class LiveTensor:
    """A dense tensor of an object that was not copied, and its path in the object. Nothing counts the writes to memory
    that a numpy array owns.
    """

    tensor: torch.Tensor
    path: str
    of_numpy: bool


@dataclass(slots=True)
class EncodedObject:
    """An object's JSON, and its tensors by extent name.

    `tensors` are private contiguous copies in host memory, made when the object was encoded: later changes of the
    object do not reach them. `live` are the object's own memory, to be read before it changes. `names` has the name by
    which each of them can be looked at, see `capture.state.tensor_names`; it is empty for objects that nobody looks at.
    """

    name: str
    json: bytes
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    live: dict[str, LiveTensor] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def encode_object(name: str, value: Any, *, live: bool = False, named: bool = False) -> EncodedObject:
    """Encode the current value of `value`; when `live`, most of its tensors stay where they are, and only
    MOST_COPIED_BYTES are copied. When `named`, its tensors can be looked at by their places in the object.
    UnsupportedError names the path of anything that can't be stored as data.
    """
    encoded = EncodedObject(name, b"")
    tree = Encoder(encoded, copied_bytes=MOST_COPIED_BYTES if live else None).tree(value, name, 0)
    try:
        encoded.json = json.dumps(tree, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(
            f"{_path_of_no_text(tree, name)}: a string with a lone surrogate is no valid text: decode it without "
            "surrogateescape, or give it as bytes"
        ) from error
    if named and (encoded.tensors or encoded.live):
        encoded.names = tensor_names(tree, of=name)
    return encoded


def decode_object(name: str, data: bytes, *, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Decode `data`; `tensor` returns the tensor for an extent name. FormatError names the part that is malformed."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"object {name!r}: not readable as JSON: {error}") from error
    try:
        return Decoder(tensor).value(tree, name)
    except RecursionError as error:
        raise FormatError(f"object {name!r}: nested too deeply") from error


def _path_of_no_text(tree: Any, path: str) -> str | None:
    """Return the path of the first string in a JSON tree that can't be encoded; None when all can be."""
    if isinstance(tree, str):
        try:
            tree.encode()
        except UnicodeEncodeError:
            return path
    if isinstance(tree, dict) and "$" in tree:
        return _path_of_no_text(tree.get("items"), path)
    if isinstance(tree, dict):
        inside = [(key, f"{path} (a key)") for key in tree] + [(v, f"{path}[{key!r}]") for key, v in tree.items()]
    else:
        inside = [(item, f"{path}[{i}]") for i, item in enumerate(tree)] if isinstance(tree, list) else []
    return next((found for item, at in inside if (found := _path_of_no_text(item, at)) is not None), None)


def have_same_content(one: EncodedObject, other: EncodedObject) -> bool:
    """Return whether both have the same JSON and, bit for bit, the same copied tensors."""
    if one.json != other.json or one.tensors.keys() != other.tensors.keys():
        return False
    return all(
        torch.equal(tensor.view(-1).view(torch.uint8), other.tensors[name].view(-1).view(torch.uint8))
        for name, tensor in one.tensors.items()
    )


def inlined(encoded: EncodedObject) -> EncodedObject:
    """Return the same object with its copied tensors inside its JSON.

    A snapshot uses this for an object that has grown since the plan was made: its header has no room left for the names
    of further extents.
    """
    tree = _with_data(json.loads(encoded.json), encoded.tensors)
    inside = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()
    return EncodedObject(encoded.name, inside, live=encoded.live, names=encoded.names)


def _with_data(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_with_data(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("$") not in ("tensor", "ndarray"):
        return {key: _with_data(item, tensors) for key, item in tree.items()}
    if tree["entry"] not in tensors:
        return tree
    tensor = tensors[tree["entry"]]
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return {
        "$": tree["$"],
        "dtype": dtype_name(tensor.dtype, what=tree["entry"]),
        "shape": list(tensor.shape),
        "base64": base64.b64encode(data).decode(),
    }


class Encoder:
    """Converts values to JSON trees.

    A subclass overrides `tree` to support more classes, and `tensor` to keep tensors elsewhere.
    """

    def __init__(self, encoded: EncodedObject, *, copied_bytes: int | None = None) -> None:
        """`copied_bytes`: how much of the tensors is copied at most, where they can stay where they are; None: all."""
        self._encoded = encoded
        self._copied_bytes = copied_bytes

    def tree(self, value: Any, path: str, depth: int) -> Any:
        """Return the JSON tree of `value`, whose path in the object is `path`."""
        if depth > _MAX_DEPTH:
            raise UnsupportedError(f"{path}: nested deeper than {_MAX_DEPTH} levels, or containing itself")
        if type(value) in _SCALARS:
            return value
        # A subclass of float, such as numpy's float64, is stored as a plain float; JSON has no NaN or infinity.
        if isinstance(value, float):
            return float(value) if isfinite(value) else {"$": "float", "hex": float(value).hex()}
        if type(value) in (list, tuple) and depth < _MAX_DEPTH and set(map(type, value)) <= _SCALARS:
            # Thousands of numbers, such as the state of Python's generator, which is encoded after every step.
            return list(value) if type(value) is list else {"$": "tuple", "items": list(value)}
        if type(value) is list:
            return [self.tree(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        if type(value) in (tuple, torch.Size):
            return {"$": "tuple", "items": [self.tree(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]}
        if isinstance(value, Mapping):
            return self.mapping(value, path, depth)
        return self._leaf(value, path)

    def mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        """Return the JSON tree of a dictionary; the order of its keys is preserved."""
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: self.tree(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
        pairs = [
            [self.tree(key, f"{path} (a key)", depth + 1), self.tree(item, f"{path}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {"$": "dict", "items": pairs}

    def _leaf(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_meta or value.is_quantized:
                what = "a quantized tensor" if value.is_quantized else f"a tensor of layout {value.layout}"
                raise UnsupportedError(
                    f"{path}: {what} on {value.device} can't be stored: only dense ones can, such as to_dense() gives"
                )
            if type(value) in _PLAIN and _is_dense(value) and self._may_stay(value.nbytes):
                return {"$": "tensor", **self._live(LiveTensor(value.detach(), path, of_numpy=False))}
            return {"$": "tensor", **self.tensor(value.detach().to("cpu", copy=True).contiguous(), path)}
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.hasobject is False:
            stays = type(value) is np.ndarray and value.flags.carray and self._may_stay(value.nbytes)
            array = value if stays else np.array(value, order="C")
            try:
                tensor = torch.from_numpy(array)
                kept = self._live(LiveTensor(tensor, path, of_numpy=True)) if stays else self.tensor(tensor, path)
                return {"$": "ndarray", **kept}
            except TypeError as error:
                raise UnsupportedError(f"{path}: numpy dtype {array.dtype} can't be stored: convert it") from error
        if type(value) in (bytes, bytearray):
            return {"$": "bytes", "base64": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"$": "dtype", "name": dtype_name(value, what=path)}
        if isinstance(value, torch.device):
            return {"$": "device", "name": str(value)}
        raise UnsupportedError(
            f"{path}: a {type(value).__module__}.{type(value).__qualname__} can't be stored as data: keep it out "
            "of the state, or give its content as numbers, strings, lists, dicts or tensors"
        )

    def tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        """Keep `tensor`, a private contiguous host tensor, and return the fields that refer to it."""
        entry = self._entry(tensor, path)
        self._encoded.tensors[entry] = tensor
        return {"entry": entry}

    def _live(self, live: LiveTensor) -> dict[str, Any]:
        entry = self._entry(live.tensor, live.path)
        self._encoded.live[entry] = live
        return {"entry": entry}

    def _entry(self, tensor: torch.Tensor, path: str) -> str:
        dtype_name(tensor.dtype, what=path)
        return f"{self._encoded.name}/{len(self._encoded.tensors) + len(self._encoded.live)}"

    def _may_stay(self, nbytes: int) -> bool:
        """Return whether `nbytes` more would be more than may be copied; they count as copied if not."""
        if self._copied_bytes is None:
            return False
        if nbytes > self._copied_bytes:
            return True
        self._copied_bytes -= nbytes
        return False


def _is_dense(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


class Decoder:
    """Converts JSON trees back to values. A subclass overrides `tagged` to support more tags."""

    def __init__(self, tensor: Callable[[str], torch.Tensor]) -> None:
        self._tensor = tensor

    def value(self, tree: Any, path: str) -> Any:
        """Return the value that `tree` represents. FormatError names the path of a malformed part."""
        if isinstance(tree, list):
            return [self.value(item, f"{path}[{i}]") for i, item in enumerate(tree)]
        if not isinstance(tree, dict):
            return tree
        if "$" not in tree:
            return {key: self.value(item, f"{path}[{key!r}]") for key, item in tree.items()}
        try:
            return self.tagged(tree, path)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            # A file may contain a tagged tree with missing or wrong fields, which fails in these ways. A FormatError of
            # a nested tree, which is also a ValueError, already names the exact path.
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"object {path}: malformed {tree.get('$')!r}: {error}") from error

    def tagged(self, tree: dict[str, Any], path: str) -> Any:
        """Return the value that a tree with a tag represents."""
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
                return self.stored_tensor(tree, path)
            case "ndarray":
                return self.stored_tensor(tree, path).numpy()
            case "dtype":
                return _dtype(tree["name"], path)
            case "device":
                return torch.device(tree["name"])
            case tag:
                raise FormatError(f"object {path}: the tag {tag!r} is not known to this release")

    def stored_tensor(self, tree: dict[str, Any], path: str) -> torch.Tensor:
        """Return the tensor that `tree` refers to by extent name, or holds in its own JSON."""
        if "entry" in tree:
            return self._tensor(tree["entry"])
        dtype, data = _dtype(tree["dtype"], path), bytearray(base64.b64decode(tree["base64"], validate=True))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.view(tree["shape"])


def _dtype(name: Any, path: str) -> torch.dtype:
    if name not in DTYPES:
        raise FormatError(f"object {path}: dtype {name!r} is not one of {', '.join(DTYPES)}")
    return torch_dtype(name)
