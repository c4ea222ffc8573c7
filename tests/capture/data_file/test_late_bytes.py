"""Large tensors of objects are written from where they are, behind the planned bytes; an edit meanwhile is found."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from capture_helpers import MIB, faulty_session, make, one_step

import capture
import native
from capture.data_file.data_file import PlacedObject
from capture.data_file.late_bytes import ObjectTensors
from capture.devices.copies import CUDA, DeviceCopier, Piece
from capture.state.objects import MOST_COPIED_BYTES, encode_object
from catalog.errors import SnapshotError
from catalog.history import History
from catalog.verify import verify

ALIGN = 4096


class Average:
    """Averages of any kind, as a user keeps them."""

    def __init__(self) -> None:
        self.values = {
            "small": torch.randn(3),
            "large": torch.randn(1000, 1000),
            "half": torch.randn(1_500_001).bfloat16(),
            "strided": torch.randn(900, 900).t(),
            "array": np.arange(400_000, dtype=np.int32),
            "empty": torch.empty(0),
        }

    def update(self) -> None:
        for value in self.values.values():
            value += 1

    def state_dict(self) -> dict[str, object]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.values = dict(state)


def same(a: Average, b: Average) -> bool:
    pairs = [(a.values[name], b.values[name]) for name in a.values]
    return all(type(x) is type(y) and x.dtype == y.dtype and bool((x == y).all()) for x, y in pairs)


@pytest.fixture
def file(tmp_path: Path) -> Iterable[native.WriteJob]:
    """A file in which one planned tensor is written."""
    writer = native.Writer(backend="posix", budget_bytes=16 * MIB)
    planned = np.ones(ALIGN, np.uint8)
    one = [np.array([value], np.uint64) for value in (ALIGN, planned.ctypes.data, ALIGN)]
    eager = np.ones(1, np.uint8)
    plan = native.WritePlan(
        offsets=one[0], addresses=one[1], nbytes=one[2], eager=eager, data_start=ALIGN, data_end=2 * ALIGN, align=ALIGN
    )
    yield writer.start(plan, str(tmp_path / "file"))
    writer.close()


def begun(
    file: native.WriteJob, value: object, *, after: Callable[[], None] = lambda: None, copies: DeviceCopier = CUDA
) -> ObjectTensors:
    objects = [PlacedObject(encode_object("mine", value, live=True), "replicated")]
    return ObjectTensors(objects, file, align=ALIGN, copies=copies, after=after)


def test_an_average_that_is_updated_after_the_optimizer_is_restored_bit_for_bit(history):
    """Also at a step that is captured on demand, after which the average goes on changing."""
    model, optimizer = make()
    average = Average()
    providers = [capture.Stateful("average", average)]
    session = faulty_session(model, optimizer, history, faults=native.Faults(), every=2, providers=providers)
    kept = {}
    for step in range(1, 4):
        one_step(model, optimizer)
        average.update()
        kept[step] = Average()
        kept[step].values = {name: value + 0 for name, value in average.values.items()}
    on_demand = session.snapshot()
    average.update()
    session.close()
    assert on_demand == 3
    assert verify(History.open(history)) == []
    for step in (2, 3):
        back = Average()
        model, optimizer = make()
        providers = [capture.Stateful("average", back)]
        capture.restore(step, history=history, model=model, optimizer=optimizer, providers=providers)
        assert same(back, kept[step]), step


def test_an_edit_between_forward_and_update_fails_the_snapshot_by_name(history):
    """The bytes of a large tensor are read until the barrier."""
    model, optimizer = make()
    large = torch.zeros(2 * MIB)
    session = faulty_session(
        model,
        optimizer,
        history,
        faults=native.Faults(delay_us=30_000),
        providers=[capture.Stateful("mine", {"large": large})],
    )
    session.wait()
    one_step(model, optimizer)
    loss = model(torch.randn(8, 64)).square().mean()
    large += 1
    loss.backward()
    optimizer.step()
    with pytest.raises(SnapshotError, match=r"mine\['large'\]"):
        session.wait()
    session.close()


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_an_edit_before_all_is_read_is_found(file, kind):
    """An array has no counter of writes: the bytes that were written tell."""
    value = torch.zeros(MIB) if kind == "tensor" else np.zeros(MIB, np.float32)
    gate = threading.Event()
    tensors = begun(file, {"edited": value, "left": torch.zeros(MIB)}, after=gate.wait)
    value += 1
    gate.set()
    tensors.require()
    assert tensors.changed == ["object " + repr("mine['edited']")]


def test_an_edit_after_all_is_read_is_none(file):
    """What comes later can't reach the file."""
    value, array = torch.zeros(MIB), np.zeros(MIB, np.float32)
    tensors = begun(file, [value, array])
    tensors.require()
    value += 1
    array += 1
    assert tensors.changed == []
    assert [placed.piece.name for placed in tensors.placed] == ["mine/0", "mine/1"]
    zeros = native.checksum(bytes(4 * MIB))
    assert [placed.checksum for placed in tensors.placed] == [zeros, zeros]


def test_tensors_up_to_a_limit_are_copied_whatever_their_number():
    """Many small ones are not more than one large one."""
    many = [torch.zeros(25_000) for _ in range(100)]
    encoded = encode_object("mine", many, live=True)
    assert sum(tensor.nbytes for tensor in encoded.tensors.values()) <= MOST_COPIED_BYTES
    assert len(encoded.tensors) + len(encoded.live) == 100
    assert {live.tensor.data_ptr() for live in encoded.live.values()} <= {tensor.data_ptr() for tensor in many}


class OtherMemory:
    """A device from which bytes arrive when a transfer is waited for, and whose copies must be announced."""

    def __init__(self) -> None:
        self.announced: list[torch.Tensor] = []

    def owns(self, tensor: torch.Tensor) -> bool:
        return True

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        self.announced += tensors

    def require_running(self) -> None:
        """No graph is ever captured here."""

    def enter_thread(self, device: torch.device) -> None:
        self.entered = threading.get_ident()

    def beside(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        assert self.entered == threading.get_ident(), "this thread would use device 0"
        return contextlib.nullcontext()

    def copy(self, pieces: Sequence[Piece], slot: torch.Tensor) -> "OtherMemory":
        assert self.announced
        assert self.entered == threading.get_ident(), "this thread would use device 0"
        self._pieces, self._slot = pieces, slot
        return self

    def wait(self) -> None:
        for piece in self._pieces:
            self._slot[piece.position : piece.position + piece.nbytes] = piece.joined()


def test_tensors_of_a_device_pass_through_host_memory_piece_by_piece(file):
    """No copy of the whole tensor is made."""
    value = torch.randn(3 * MIB + 5)
    tensors = begun(file, [value], copies=OtherMemory())
    tensors.require()
    assert tensors.placed[0].checksum == native.checksum(value.numpy().tobytes())
