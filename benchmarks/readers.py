"""The ways to read a saved training: all of it into the live tensors, or a few of its tensors."""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import capture
from benchmarks.ours import Ours
from benchmarks.peers import RawDirect
from benchmarks.training_state import Training


class Reader(Protocol):
    """One way to read; `folder` belongs to it alone. Names are those of `Training.tensors`."""

    name: str

    def save(self, training: Training, folder: Path) -> None:
        """Write the files that are read afterwards; this is not measured."""

    def whole(self, training: Training) -> None:
        """Read everything into the live tensors."""

    def some(self, wanted: dict[str, torch.Tensor]) -> None:
        """Return the tensors with these names; live tensors give the shapes and may be overwritten."""


class OursReader:
    name = "DSHistory"
    verified_first = False

    def save(self, training: Training, folder: Path) -> None:
        ours = Ours(folder)
        ours.ready(training)
        ours.begin(training, folder)
        ours.close()
        self.history = ours.history
        self.names = training.parameter_names()

    def whole(self, training: Training) -> None:
        capture.restore(
            history=self.history, model=training.model, optimizer=training.optimizer, verify=self.verified_first
        )

    def some(self, wanted: dict[str, torch.Tensor]) -> None:
        kinds = {"model" if key.startswith("model/") else key.rpartition("/")[2] for key in wanted}
        names = {self.names[key] for key in wanted}
        found = capture.restore(history=self.history, names=sorted(names), kinds=sorted(kinds))
        assert sum(map(len, found.values())) >= len(wanted)


class OursVerifiedReader(OursReader):
    """The default of `restore`: everything is read and verified once before anything is overwritten."""

    name = "DSHistory, verified first"
    verified_first = True


class OursVerifiedAtHandReader(OursVerifiedReader):
    """The same on a host that has free memory at hand, as hosts have whose memory is their own.

    A virtual machine that gives freed memory back to its host waits for every page of new memory.
    """

    name = "DSHistory, verified first, memory at hand"

    def free_memory(self, training: Training) -> None:
        """Take as much memory as the restore will take and free it: it stays at hand for a second or two."""
        with mmap.mmap(-1, training.state_bytes() + (256 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            for page in range(0, len(memory), mmap.PAGESIZE):
                memory[page] = 1


class TorchLoad:
    name = "torch.load"
    mapped = False

    def save(self, training: Training, folder: Path) -> None:
        self.path = folder / "state.pt"
        torch.save(training.tensors(), self.path)

    def whole(self, training: Training) -> None:
        self.some(training.tensors())

    def some(self, wanted: dict[str, torch.Tensor]) -> None:
        saved = torch.load(self.path, weights_only=True, mmap=self.mapped)
        for name, tensor in wanted.items():
            tensor.copy_(saved[name])


class TorchLoadMapped(TorchLoad):
    name = "torch.load, mmap"
    mapped = True


class SafetensorsReader:
    name = "safetensors"

    def save(self, training: Training, folder: Path) -> None:
        self.path = folder / "state.safetensors"
        save_file(training.tensors(), self.path)

    def whole(self, training: Training) -> None:
        saved = load_file(self.path)
        for name, tensor in training.tensors().items():
            tensor.copy_(saved[name])

    def some(self, wanted: dict[str, torch.Tensor]) -> None:
        with safe_open(self.path, framework="pt") as saved:
            for name, tensor in wanted.items():
                tensor.copy_(saved.get_tensor(name))


class DistributedReader:
    name = "DCP load"

    def save(self, training: Training, folder: Path) -> None:
        self.folder = folder
        dcp.save(training.tensors(), checkpoint_id=folder, no_dist=True)

    def whole(self, training: Training) -> None:
        self.some(training.tensors())

    def some(self, wanted: dict[str, torch.Tensor]) -> None:
        dcp.load(wanted, checkpoint_id=self.folder, no_dist=True)


class RawReader:
    """The limit of the disk: as many bytes by O_DIRECT into existing memory, without lookups or copies."""

    name = RawDirect.name
    piece = 1 << 20

    def __init__(self) -> None:
        self.raw = RawDirect()
        self.buffer = mmap.mmap(-1, 4 * self.piece)

    def save(self, training: Training, folder: Path) -> None:
        self.raw.begin(training, folder)

    def whole(self, training: Training) -> None:
        self.raw.load(training)

    def some(self, wanted: dict[str, torch.Tensor]) -> None:
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in wanted.values())
        descriptor = os.open(self.raw.folder / "state.raw", os.O_RDONLY | os.O_DIRECT)
        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda lane: self._lane(descriptor, lane, -(-nbytes // 4096) * 4096), range(4)))
        finally:
            os.close(descriptor)

    def _lane(self, descriptor: int, lane: int, nbytes: int) -> None:
        view = memoryview(self.buffer)[lane * self.piece :]
        for at in range(lane * self.piece, nbytes, 4 * self.piece):
            os.preadv(descriptor, [view[: min(self.piece, nbytes - at)]], at)


READERS = (
    OursReader,
    OursVerifiedReader,
    OursVerifiedAtHandReader,
    RawReader,
    TorchLoad,
    TorchLoadMapped,
    SafetensorsReader,
    DistributedReader,
)
