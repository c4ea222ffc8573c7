"""The names of an object's tensors are their places in the object, and no two are equal."""

import torch

from capture.state.objects import MOST_COPIED_BYTES, encode_object, inlined

ONE = torch.zeros(1)


def names_of(value: object, *, live: bool = False) -> list[str]:
    encoded = encode_object("ema", value, named=True, live=live)
    assert encoded.names.keys() == encoded.tensors.keys() | encoded.live.keys()
    return list(encoded.names.values())


def test_keys_and_indices_on_the_way_are_joined_by_dots():
    state = {"module": {"a.weight": ONE}, "shadow": [1, ONE, (ONE.numpy(), {"x": ONE})], 7: {(1, 2): ONE}, "n": 3}
    assert names_of(state) == ["module.a.weight", "shadow.1", "shadow.2.0", "shadow.2.1.x", "7.[1, 2]"]
    assert names_of(ONE) == ["ema"]
    assert names_of({"$": ONE, "a": [3.5]}) == ["$"]


def test_equal_places_get_numbers():
    assert names_of({"a.b": ONE, "a": {"b": ONE}, "a.b (2)": ONE}) == ["a.b", "a.b (2)", "a.b (2) (2)"]


def test_live_tensors_have_names_too_and_keep_them():
    large = torch.zeros(MOST_COPIED_BYTES)
    assert names_of({"large": large, "small": ONE}, live=True) == ["large", "small"]
    encoded = inlined(encode_object("ema", {"large": large, "small": ONE}, named=True, live=True))
    assert [encoded.names[entry] for entry in encoded.live] == ["large"]


def test_objects_that_nobody_looks_at_have_none():
    assert not encode_object("rng", {"torch": ONE}).names
