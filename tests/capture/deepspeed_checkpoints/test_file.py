"""A checkpoint tree in one file: types and sharing come back, no data is lost, and every damaged byte is found."""

import json
import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from late_device import LateDevice
from safetensors import safe_open

import native
from capture.deepspeed_checkpoints.file import FileWrite, is_tree_file, read_tree
from capture.deepspeed_checkpoints.torch_files import load_torch_file, to_map_location
from capture.deepspeed_checkpoints.tree import COMMON_CLASSES, decode_tree, encode_tree
from capture.devices.copies import CUDA
from catalog.errors import FormatError, UnsupportedError

BLOCK = 64 << 10


@pytest.fixture
def writer():
    made = native.Writer(backend="posix", budget_bytes=1 << 20, block_bytes=BLOCK)
    yield made
    made.close()


def begin(value, path, writer, *, lazy=(), pickle=False, copies=CUDA):
    state = encode_tree(value, known=COMMON_CLASSES, pickle=pickle)
    storages = frozenset(tensor.untyped_storage().data_ptr() for tensor in lazy)
    return FileWrite.start(state, path, writer=writer, lazy_storages=storages, align=4096, copies=copies)


def read(path, *, pickle=False):
    tree, tensors = read_tree(path)
    return decode_tree(tree, tensors, what=str(path), known=COMMON_CLASSES, pickle=pickle)


def write(value, path, writer, **settings):
    begin(value, path, writer, **settings).finish()
    return path


PLAIN = {
    "none": None,
    "numbers": [1, -(2**70), 0.1, float("inf"), 1 + 2j, True],
    1: "an int as a key",
    (0, "x"): "a tuple as a key",
    None: OrderedDict(b=1, a=OrderedDict({3: "x"})),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda:1"),
    "sets": ({1, 2}, frozenset({3})),
    "spans": [slice(1, None, 2), range(3, 9)],
    "bytes": [b"\x00\xff", bytearray(b"ab")],
    "path": Path("a/b"),
    "space": SimpleNamespace(inner=SimpleNamespace(x=(1,))),
    "$": "the tag's own name",
    "deep": {"a": [{"b": ({},)}]},
}


def test_plain_data_comes_back_with_its_types(tmp_path, writer):
    stored = read(write(PLAIN, tmp_path / "x.pt", writer))
    assert stored == PLAIN
    assert list(stored) == list(PLAIN)
    for key in PLAIN:
        assert type(stored[key]) is type(PLAIN[key])
    assert [type(one) for one in stored["sets"]] == [set, frozenset]
    assert type(stored["bytes"][1]) is bytearray
    assert read(write(5, tmp_path / "five.pt", writer)) == 5


def test_tensors_of_every_kind_come_back(tmp_path, writer):
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.uint16)
    value = {
        "kinds": [torch.arange(6).to(dtype).view(2, 3) for dtype in dtypes],
        "large": torch.randn(3 * BLOCK),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "turned": torch.randn(3, 4, 5).permute(2, 0, 1),
        "gaps": torch.arange(20)[::3],
        "expanded": torch.ones(1).expand(100, 100),
        "arrays": [np.arange(3), np.float64(0.5), np.int32(7), np.array(True)],
    }
    stored = read(write(value, tmp_path / "x.pt", writer))
    for one, other in zip(stored["kinds"], value["kinds"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    for name in ("large", "scalar", "empty", "turned", "gaps", "expanded"):
        assert torch.equal(stored[name], value[name])
        assert stored[name].shape == value[name].shape
    assert stored["turned"].stride() == value["turned"].stride()
    assert stored["parameter"].requires_grad
    assert [type(one) for one in stored["arrays"]] == [np.ndarray, np.float64, np.int32, np.ndarray]
    # An expanded tensor is stored as its one element.
    assert (tmp_path / "x.pt").stat().st_size < 4 * 3 * BLOCK + (1 << 17)


def test_tensors_that_share_memory_are_written_once_and_share_it_again(tmp_path, writer):
    flat = torch.randn(100_000)
    value = {
        "a": flat[:70_000],
        "b": flat[70_000:],
        "overlap": flat[10:90_000],
        "same": flat[:70_000],
        "apart": flat + 1,
    }
    stored = read(write(value, tmp_path / "x.pt", writer))
    for name, tensor in value.items():
        assert torch.equal(stored[name], tensor)
    assert (tmp_path / "x.pt").stat().st_size < 4 * 200_000 + (1 << 17)
    stored["overlap"][0] = 5
    assert stored["a"][10] == stored["same"][10] == 5
    assert stored["apart"][10] == value["apart"][10]


def test_neighbours_of_one_storage_are_separate_entries(tmp_path, writer):
    flat = torch.randn(10)
    path = write(OrderedDict({"layer.w": flat[:6].view(2, 3), "layer.b": flat[6:]}), tmp_path / "x.pt", writer)
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("state/layer.w"), flat[:6].view(2, 3))
        assert torch.equal(file.get_tensor("state/layer.b"), flat[6:])


def test_the_metadata_of_a_state_dict_is_kept(tmp_path, writer):
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    stored = read(write(module.state_dict(), tmp_path / "x.pt", writer))
    assert stored._metadata == module.state_dict()._metadata
    module.load_state_dict(stored)


def test_lazy_memory_is_read_until_the_release_and_everything_else_is_copied(tmp_path, writer):
    lazy, moving = torch.randn(20 * BLOCK), torch.randn(1000)
    expected = lazy.clone(), moving.clone()
    slow = native.Writer(
        backend="posix", budget_bytes=1 << 20, block_bytes=BLOCK, faults=native.Faults(delay_us=20_000)
    )
    pending = begin({"lazy": lazy, "moving": moving}, tmp_path / "x.pt", slow, lazy=[lazy])
    assert pending.live_bytes == 4 * 20 * BLOCK
    moving.zero_()
    assert not (tmp_path / "x.pt").exists()
    pending.release()
    lazy.zero_()
    pending.finish()
    stored = read(tmp_path / "x.pt")
    assert torch.equal(stored["lazy"], expected[0])
    assert torch.equal(stored["moving"], expected[1])
    slow.close()


def test_device_tensors_are_fed(tmp_path, writer):
    device = LateDevice(lambda tensor: tensor.numel() > 10)
    large, small = torch.randn(3 * BLOCK), torch.randn(3)
    expected = large.clone()
    pending = begin({"large": large, "small": small}, tmp_path / "x.pt", writer, lazy=[large], copies=device)
    device.gate.set()
    pending.release()
    large.zero_()
    pending.finish()
    stored = read(tmp_path / "x.pt")
    assert torch.equal(stored["large"], expected)
    assert torch.equal(stored["small"], small)


class Odd:
    def __init__(self, value=5):
        self.value = value


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": [1, Odd()]}, r"\['a'\]\[1\]: a .*Odd can't be stored as data.*pickle=True"),
        ({"a": {"s": torch.eye(2).to_sparse()}}, r"\['a'\]\['s'\].*sparse"),
        ({"a": torch.empty(2, device="meta")}, r"\['a'\].*no bytes"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, r"\['a'\].*complex64"),
        ({"a": {Odd: 1}}, "a key.*type"),
        ({"a": lambda: 1}, "function"),
        ({"a": type("Named", (dict,), {})(x=1)}, "Named"),
    ],
)
def test_a_value_that_is_not_data_is_refused_by_name(value, match, tmp_path, writer):
    with pytest.raises(UnsupportedError, match=match):
        begin(value, tmp_path / "x.pt", writer)
    assert not list(tmp_path.iterdir())


def test_a_state_that_holds_itself_is_refused(tmp_path, writer):
    value = {}
    value["value"] = [value]
    with pytest.raises(UnsupportedError, match="containing itself"):
        begin(value, tmp_path / "x.pt", writer)


def test_pickle_is_for_both_sides_or_none(tmp_path, writer):
    path = write({"odd": [Odd(7)]}, tmp_path / "x.pt", writer, pickle=True)
    with pytest.raises(FormatError, match=r"\['odd'\]\[0\]: a pickled .*Odd.*pickle=True"):
        read(path)
    assert read(path, pickle=True)["odd"][0].value == 7


def test_every_damaged_byte_that_matters_is_found(tmp_path, writer):
    value = {"w": torch.randn(5), "o": OrderedDict(a=torch.arange(3)), "x": "text"}
    path = write(value, tmp_path / "x.pt", writer)
    whole = path.read_bytes()
    damaged = tmp_path / "damaged.pt"
    survived = []
    # Spaces after the header's JSON and the padding carry nothing, yet the header's checksum covers the spaces too.
    for at in range(0, len(whole), 29):
        damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            stored = read(damaged)
        except FormatError:
            continue
        assert torch.equal(stored["w"], value["w"])
        assert stored["x"] == "text"
        survived.append(at)
    assert all(whole[at] == 0 for at in survived)
    damaged.write_bytes(whole[:-4096])
    with pytest.raises(FormatError):
        read(damaged)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree["w"].update(entry="no such entry"),
        lambda tree: tree["w"].update(view={"shape": [100], "stride": [1], "begin": 0}),
        lambda tree: tree["w"].update(view={"shape": [2], "stride": [1], "begin": -3}),
        lambda tree: tree["w"].update(view={"shape": "x"}),
        lambda tree: tree["o"].update({"$": "os.system"}),
        lambda tree: tree["o"].update({"items": 3}),
        lambda tree: tree.update(c={"$": "complex", "value": "ls"}),
        lambda tree: tree.update(c={"$": "pickle", "base64": "gASVCgAAAAAAAACMBnN5c3RlbZQu", "class": "os.system"}),
        lambda tree: tree.update(c={"$": "size", "value": {"a": 1}}),
    ],
)
def test_a_malformed_tree_is_a_format_error(change):
    state = encode_tree({"w": torch.randn(5), "o": OrderedDict(a=1)}, known=COMMON_CLASSES, pickle=False)
    tree = json.loads(json.dumps(state.json))
    change(tree)
    with pytest.raises(FormatError):
        decode_tree(tree, state.tensors, what="x", known=COMMON_CLASSES, pickle=False)


def test_a_tree_that_is_too_deep_is_a_format_error():
    tree = []
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(FormatError, match="too deeply"):
        decode_tree(tree, {}, what="x", known=COMMON_CLASSES, pickle=False)


def test_a_failed_write_leaves_nothing_and_the_older_file_in_place(tmp_path, writer):
    path = write({"a": torch.ones(3)}, tmp_path / "x.pt", writer)
    full = native.Writer(
        backend="posix", budget_bytes=1 << 20, block_bytes=BLOCK, faults=native.Faults(fail_after=0, errno=28)
    )
    pending = begin({"a": torch.zeros(3)}, path, full)
    with pytest.raises(OSError, match="No space left"):
        pending.finish()
    pending.abort()
    pending.abort()
    assert [one.name for one in tmp_path.iterdir()] == ["x.pt"]
    assert torch.equal(read(path)["a"], torch.ones(3))
    full.close()


def test_files_of_torch_save_load_without_running_their_code(tmp_path, writer):
    ours = write({"a": 1}, tmp_path / "ours.pt", writer)
    theirs = tmp_path / "theirs.pt"
    value = {"w": torch.randn(3), "n": SimpleNamespace(x=1), "rng": np.arange(3), "f": np.float64(3)}
    torch.save(value, theirs)
    assert is_tree_file(ours)
    assert not is_tree_file(theirs)
    stored = load_torch_file(theirs, map_location="cpu", classes=[SimpleNamespace], pickle=False)
    assert torch.equal(stored["w"], value["w"])
    assert stored["n"] == value["n"]
    assert np.array_equal(stored["rng"], value["rng"])
    torch.save({"odd": Odd()}, theirs)
    with pytest.raises(FormatError, match=r"Odd[\s\S]*pickle=True"):
        load_torch_file(theirs, map_location="cpu", classes=[], pickle=False)
    assert load_torch_file(theirs, map_location="cpu", classes=[], pickle=True)["odd"].value == 5
    theirs.write_bytes(pickle.dumps(1, protocol=2)[:-1] + b"garbage")
    with pytest.raises(FormatError, match="neither one of our files"):
        load_torch_file(theirs, map_location="cpu", classes=[], pickle=False)


@pytest.mark.parametrize(
    "where",
    [
        None,
        "cpu",
        torch.device("cpu"),
        {"cpu": "cpu"},
        lambda storage, location: storage,
        lambda storage, location: None,
    ],
)
def test_map_location_works_as_in_torch_load(where):
    tensor = torch.randn(3)
    assert to_map_location(tensor, where) is tensor
    assert to_map_location(tensor, "meta").is_meta
    assert to_map_location(tensor, {"cpu": "meta"}).is_meta
