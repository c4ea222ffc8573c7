"""A simulated device that copies as late as the protocol allows, newest transfer and last piece first."""

import contextlib
import datetime
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import native
from capture.devices.copies import Piece
from capture.loops.select import loop_for
from capture.session.options import SessionOptions
from capture.session.session import Session
from capture.snapshot.snapshot import Snapshot
from capture.snapshot.state_listing import StateListing
from capture.state.providers import RandomState
from capture.state.weights_only import weights_of
from catalog.errors import UnsupportedError
from catalog.records import RunFacts
from catalog.run_writer import RunWriter, create_history, create_run, new_run_id

BLOCK = 64 << 10
MOST_UNPINNED = 4 << 20
"""What is appended to a file passes through a little memory outside the staging budget."""
LEAST_BUDGET = 2 * BLOCK + 4 * (64 << 10)


class LateTransfer:
    def __init__(
        self, device: "LateDevice", pieces: Sequence[Piece], slot: torch.Tensor, *, fails: Exception | None
    ) -> None:
        self._fails = fails
        self._device = device
        self._pieces: list[Piece] = list(pieces)
        self._slot = slot

    def wait(self) -> None:
        self._device.gate.wait()
        self._device.waited += 1
        if self._fails:
            raise self._fails
        self._device.land()

    def land(self) -> None:
        for piece in reversed(self._pieces):
            self._slot[piece.position : piece.position + piece.nbytes] = piece.joined()
            self._device.copies += 1
        self._pieces.clear()


class LateDevice:
    """A simulated device that owns every tensor for which `held` is true.

    It copies nothing, and does no work beside the training, before `gate` is set, and copies only when a caller waits
    for a transfer. `fails_to_begin` and `fails_to_end` give the number of a transfer, or several, and the exception
    that is raised. While it is `recording`, work is not done.
    """

    def __init__(
        self,
        held: Callable[[torch.Tensor], bool] = lambda tensor: True,
        *,
        fails_to_begin: tuple[int, Exception] | None = None,
        fails_to_end: tuple[Collection[int], Exception] | None = None,
    ) -> None:
        self.gate = threading.Event()
        self.ending = False
        self.recording = False
        self.copies = 0
        self.begun = 0
        self.waited = 0
        self.most_in_flight = 0
        self.pinned: set[tuple[int, int]] = set()
        self.entered: set[int] = set()
        self._held = held
        self._fails_to_begin = fails_to_begin
        self._fails_to_end = fails_to_end
        self._lock = threading.Lock()
        self._flying: list[LateTransfer] = []
        self._transfers = 0

    def owns(self, tensor: torch.Tensor) -> bool:
        return bool(self._held(tensor))

    def pin(self, writer: native.Writer) -> None:
        self.pinned.add(writer.staging)

    def unpin(self, writer: native.Writer) -> None:
        assert not self._flying
        self.pinned.discard(writer.staging)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: a transfer copies the bytes that a tensor has at the time of the copy."""

    def require_running(self) -> None:
        if self.recording:
            raise UnsupportedError("a graph is being captured")

    def enter_thread(self, device: torch.device) -> None:
        self.entered.add(threading.get_ident())

    @contextlib.contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        assert threading.get_ident() in self.entered, "this thread would use device 0"
        self.gate.wait()
        yield

    def copy(self, pieces: Sequence[Piece], slot: torch.Tensor) -> LateTransfer:
        assert threading.get_ident() in self.entered, "this thread would use device 0"
        staged = (at <= slot.data_ptr() and slot.data_ptr() + slot.numel() <= at + size for at, size in self.pinned)
        assert any(staged) or slot.numel() <= MOST_UNPINNED
        slot.fill_(113)
        with self._lock:
            self._transfers += 1
            if self._fails_to_begin is not None and self._transfers == self._fails_to_begin[0]:
                raise self._fails_to_begin[1]
            self.begun += 1
            ends = self._fails_to_end is None or self._transfers not in self._fails_to_end[0]
            transfer = LateTransfer(self, pieces, slot, fails=None if ends else self._fails_to_end[1])
            self._flying.append(transfer)
            self.most_in_flight = max(self.most_in_flight, len(self._flying))
        return transfer

    def land(self) -> None:
        with self._lock:
            while self._flying:
                self._flying.pop().land()


def late_until_the_barrier(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `device` copy only while a training is at its barrier, until the device is `ending`."""
    release = Snapshot.release

    def opened(snapshot: Snapshot) -> None:
        device.gate.set()
        release(snapshot)
        if not device.ending:
            device.gate.clear()

    monkeypatch.setattr(Snapshot, "release", opened)


def session_on(
    device: LateDevice,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    root: Path,
    *,
    writer: native.Writer,
    **options: Any,
) -> Session:
    """Return a session that captures every step of a training whose state is on `device`."""
    create_history(root)
    facts = RunFacts(new_run_id(), datetime.datetime.now(datetime.UTC).isoformat(), 1, None, None, "layout", {})
    create_run(root, facts)
    loop = loop_for(model, optimizer=optimizer)
    chosen = SessionOptions(**{"every": 1, **options})
    providers = [*loop.providers(), RandomState()]
    if chosen.what == "weights":
        providers = weights_of(providers, chosen.dtype)
    source = StateListing(providers, rank=0, world_size=1, align=4096, copies=device)
    run = RunWriter(root, run=facts.run, rank=0, world_size=1, layout_hash="layout")
    return Session(loop, source, run=run, writer=writer, options=chosen)


def small_writer(*, budget_bytes: int = LEAST_BUDGET, **faults: Any) -> native.Writer:
    """Return a writer with two slots for blocks of 64 KiB, and four small slots of the same size."""
    return native.Writer(
        backend="posix",
        budget_bytes=budget_bytes,
        block_bytes=BLOCK,
        faults=native.Faults(**faults) if faults else None,
    )
