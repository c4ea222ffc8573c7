"""The ways to save a training, each with the same four calls: begin, the next update, durable, load."""

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.measure import make_durable
from benchmarks.training_state import Training

ALIGN = 4096
BLOCK = 8 << 20


class UnavailableError(Exception):
    """This peer can't run here; the message says why and what to do."""


class Saver(Protocol):
    """One way to save a training; `folder` is a new folder for each save."""

    name: str

    def ready(self, training: Training) -> None:
        """Prepare whatever a training prepares once, before its first save."""

    def begin(self, training: Training, folder: Path) -> None:
        """Start to save the current state; block for as long as this way needs."""

    def before_update(self) -> None:
        """Return once the state may change."""

    def durable(self) -> None:
        """Return once the checkpoint would survive a power failure."""

    def load(self, training: Training) -> None:
        """Load the last saved checkpoint into the live training."""

    def close(self) -> None: ...


class Blocking:
    """Base of all savers that return only when the bytes are written, and then wait only for the disk."""

    folder: Path

    def ready(self, training: Training) -> None: ...

    def before_update(self) -> None: ...

    def durable(self) -> None:
        make_durable(self.folder)

    def close(self) -> None: ...


class TorchSave(Blocking):
    name = "torch.save"

    def begin(self, training: Training, folder: Path) -> None:
        self.folder = folder
        torch.save(training.state_dict(), folder / "state.pt")

    def load(self, training: Training) -> None:
        state = torch.load(self.folder / "state.pt", weights_only=True)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])


class Safetensors(Blocking):
    name = "safetensors"

    def begin(self, training: Training, folder: Path) -> None:
        self.folder = folder
        save_file(training.tensors(), folder / "state.safetensors")

    def load(self, training: Training) -> None:
        saved = load_file(self.folder / "state.safetensors")
        for name, tensor in training.tensors().items():
            tensor.copy_(saved[name])


class DistributedSave(Blocking):
    name = "DCP save"

    def begin(self, training: Training, folder: Path) -> None:
        self.folder = folder
        dcp.save(training.tensors(), checkpoint_id=folder, no_dist=True)

    def load(self, training: Training) -> None:
        dcp.load(training.tensors(), checkpoint_id=self.folder, no_dist=True)


class DistributedAsyncSave:
    """DCP's async_save with the settings that are correct on a CPU: the next update waits for a staging thread."""

    name = "DCP async_save"
    checkpointer = AsyncCheckpointerType.THREAD

    def __init__(self) -> None:
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
        )
        self.stager = DefaultStager(options)
        self.staged: Future[Any] | None = None
        self.uploaded: Future[Any] | None = None

    def ready(self, training: Training) -> None: ...

    def begin(self, training: Training, folder: Path) -> None:
        self.durable()  # one save at a time, because there is one staging copy
        self.folder = folder
        answer = dcp.async_save(
            training.tensors(),
            checkpoint_id=folder,
            async_stager=self.stager,
            async_checkpointer_type=self.checkpointer,
            no_dist=True,
        )
        self.staged, self.uploaded = answer.staging_completion, answer.upload_completion

    def before_update(self) -> None:
        if self.staged is not None:
            self.staged.result()

    def durable(self) -> None:
        if self.uploaded is not None:
            self.uploaded.result()
            self.uploaded = None
            make_durable(self.folder)

    def load(self, training: Training) -> None:
        dcp.load(training.tensors(), checkpoint_id=self.folder, no_dist=True)

    def close(self) -> None:
        self.durable()
        self.stager.close()


class TorchSnapshot:
    name = "torchsnapshot"

    def __init__(self) -> None:
        try:
            import torchsnapshot
        except ImportError as error:
            raise UnavailableError("not installed: make bench") from error
        self.library = torchsnapshot
        self.pending: Any = None

    def ready(self, training: Training) -> None: ...

    def begin(self, training: Training, folder: Path) -> None:
        self.folder = folder
        state = {"training": self.library.StateDict(**training.tensors())}
        self.pending = self.library.Snapshot.async_take(path=str(folder), app_state=state)

    def before_update(self) -> None: ...  # async_take returns when everything is staged

    def durable(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
            make_durable(self.folder)

    def load(self, training: Training) -> None:
        state = {"training": self.library.StateDict(**training.tensors())}
        self.library.Snapshot(path=str(self.folder)).restore(app_state=state)

    def close(self) -> None:
        self.durable()


class RawDirect(Blocking):
    """The limit of the disk, not a checkpoint: as many bytes by O_DIRECT into a new preallocated file, four blocks in
    flight.
    """

    name = "raw O_DIRECT"

    def __init__(self) -> None:
        self.block = mmap.mmap(-1, BLOCK)
        self.block.write(os.urandom(1 << 20) * (BLOCK >> 20))

    def begin(self, training: Training, folder: Path) -> None:
        self.write(training.state_bytes(), folder)

    def write(self, nbytes: int, folder: Path) -> None:
        """Write so many bytes, in whole blocks."""
        self.folder = folder
        self.bytes = -(-nbytes // BLOCK) * BLOCK
        descriptor = os.open(folder / "state.raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        try:
            os.posix_fallocate(descriptor, 0, self.bytes)
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda at: os.pwrite(descriptor, self.block, at), range(0, self.bytes, BLOCK)))
        finally:
            os.close(descriptor)

    def load(self, training: Training) -> None:
        descriptor = os.open(self.folder / "state.raw", os.O_RDONLY | os.O_DIRECT)
        buffers = [mmap.mmap(-1, BLOCK) for _ in range(4)]
        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda lane: self._read_lane(descriptor, buffers[lane], lane), range(4)))
        finally:
            os.close(descriptor)

    def _read_lane(self, descriptor: int, buffer: mmap.mmap, lane: int) -> None:
        for at in range(lane * BLOCK, self.bytes, 4 * BLOCK):
            os.preadv(descriptor, [buffer], at)


class RawDirectBeside(RawDirect):
    """The least that writing as many bytes beside a training costs it: they are neither copied nor looked at, and the
    update waits for nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = ThreadPoolExecutor(1)
        self.written: Future[None] | None = None

    def write(self, nbytes: int, folder: Path) -> None:
        self._wait()
        self.written = self.thread.submit(super().write, nbytes, folder)

    def durable(self) -> None:
        self._wait()
        super().durable()

    def close(self) -> None:
        self.thread.shutdown()

    def _wait(self) -> None:
        if self.written is not None:
            self.written.result()
            self.written = None
