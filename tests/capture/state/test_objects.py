"""Objects are stored as data and come back equal; unsupported values and malformed trees are refused by name."""

import collections
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.state.objects import EncodedObject, decode_object, encode_object, inlined
from catalog.errors import FormatError, UnsupportedError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.text() | st.just("$") | st.integers() | st.tuples(st.integers(), st.text()) | st.none()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
TENSORS = st.builds(lambda n, dtype: torch.arange(n).to(dtype), st.integers(0, 5), DTYPES) | st.builds(
    lambda x: torch.tensor(x), st.integers(-9, 9)
)
ARRAYS = st.builds(
    lambda n, dtype: np.arange(n).astype(dtype), st.integers(0, 5), st.sampled_from(["f8", "i4", "u2", "?"])
)
TREES = st.recursive(
    SCALARS | TENSORS | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


def decoded(encoded: EncodedObject) -> object:
    return decode_object(encoded.name, encoded.json, tensor=encoded.tensors.__getitem__)


def same(a: object, b: object) -> bool:
    """Return True when both are equal in type, value and bit pattern at every level."""
    if type(a) is not type(b):
        return False
    match a:
        case torch.Tensor():
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        case np.ndarray():
            return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
        case float():
            return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
        case dict():
            return len(a) == len(b) and all(
                same(x, y) and same(v, w) for (x, v), (y, w) in zip(a.items(), b.items(), strict=True)
            )
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
    return a == b


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_encoded_objects_come_back_equal(tree):
    assert same(tree, decoded(encode_object("user", tree)))


@settings(max_examples=50, deadline=None)
@given(TREES)
def test_the_tree_is_plain_json(tree):
    json.loads(encode_object("user", tree).json, parse_constant=pytest.fail)


def test_tensors_are_copied_when_they_are_encoded():
    tensor = torch.ones(3)
    array = np.ones(3)
    encoded = encode_object("user", {"tensor": tensor, "array": array})
    tensor.zero_()
    array[:] = 0
    back = decoded(encoded)
    assert torch.equal(back["tensor"], torch.ones(3))
    assert np.array_equal(back["array"], np.ones(3))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"callback": print}, "user['callback']"),
        ({"a": [1, {"b": object()}]}, "user['a'][1]['b']"),
        ((1, {2, 3}), "user[1]"),
        ({"c": 1 + 2j}, "user['c']"),
        ({"o": np.array([print], dtype=object)}, "user['o']"),
        ({"z": torch.ones(2, dtype=torch.complex64)}, "user['z']"),
    ],
)
def test_a_value_that_is_not_data_is_refused_by_its_path(value, path):
    with pytest.raises(UnsupportedError) as refused:
        encode_object("user", value)
    assert path in str(refused.value)


def test_a_tree_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(UnsupportedError, match="containing itself"):
        encode_object("user", loop)


def test_mappings_of_other_classes_come_back_as_dicts():
    milestones = collections.Counter([3, 3, 7])
    assert decoded(encode_object("lr_scheduler", {"milestones": milestones})) == {"milestones": {3: 2, 7: 1}}


@pytest.mark.parametrize(
    "text",
    [
        '{"$":"pickle","data":"gASVAAA="}',
        '{"$":"float","hex":"nonsense"}',
        '{"$":"tuple"}',
        '{"$":"tuple","items":3}',
        '{"$":"dict","items":[[1]]}',
        '{"$":"dict","items":[[[1],2]]}',
        '{"$":"bytes","base64":"???"}',
        '{"$":"tensor","entry":"not there"}',
        '{"$":"dtype","name":"Q7"}',
        '{"$":["tuple"],"items":[]}',
        '{"x":',
        "[" * 100_000,
        '{"x":' * 2_000 + "1" + "}" * 2_000,
        '{"$":"float","hex":"0x1p9999"}',
        # Python's own parser of JSON can go deeper than the decoder.
        "[" * 800 + "]" * 800,
    ],
    ids=lambda text: text[:30],
)
def test_malformed_trees_are_refused_by_name(text):
    with pytest.raises(FormatError, match="user"):
        decode_object("user", text.encode(), tensor={}.__getitem__)


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_an_object_with_its_tensors_inside_its_json_is_the_same(tree):
    encoded = inlined(encode_object("user", tree))
    assert not encoded.tensors
    assert same(tree, decoded(encoded))


@pytest.mark.parametrize(
    "change",
    [{"dtype": "F3"}, {"shape": [3]}, {"shape": [-1, 7]}, {"base64": "AAA"}, {"base64": "AAAA"}, {"base64": 5}],
)
def test_a_malformed_tensor_inside_the_json_is_refused(change):
    node = {"$": "tensor", "dtype": "F32", "shape": [2], "base64": "AAAAAAAAAAA="}
    assert decode_object("user", json.dumps(node).encode(), tensor=None).tolist() == [0.0, 0.0]
    with pytest.raises(FormatError, match="user"):
        decode_object("user", json.dumps(node | change).encode(), tensor=None)
