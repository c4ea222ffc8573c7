"""DeepSpeed's CheckpointEngine over the native writer, installed on a live engine.

DeepSpeed's own protocol for asynchronous engines is not used: it commits at the next `engine.step` only, never in a pipeline, lets the
training wait for the disk there, and moves `latest` when rank 0 is done. So `get_commit_info` has nothing to commit; the barrier is a
hook before the update itself, and `latest` is moved in the background (`checkpoint_saves`).
"""

import atexit
import functools
import os
import secrets
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import deepspeed
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.utils import zero_to_fp32

import native
from capture.collectives import Ranks
from capture.deepspeed_checkpoints.classes import DEEPSPEED_CLASSES
from capture.deepspeed_checkpoints.file import StateWrite, is_state_file, read_tree
from capture.deepspeed_checkpoints.lazy_memory import lazy_providers, steady_storages
from capture.deepspeed_checkpoints.saves import Save, Saves
from capture.deepspeed_checkpoints.torch_files import load_torch_file, moved, redirect_torch_load, save_torch_file
from capture.deepspeed_checkpoints.tree import decode_state, encode_state
from capture.loops.deepspeed.hooks import attach_barrier, wrap
from capture.snapshot.device_copies import CUDA
from capture.snapshot.failures import Failures
from capture.snapshot.writer import ChosenWriter, agree_on_writer
from catalog.errors import HistoryError, SetupError, SnapshotError, UnsupportedError

__all__ = ["NativeCheckpointEngine", "install"]

_live: weakref.WeakSet["NativeCheckpointEngine"] = weakref.WeakSet()


def install(
    engine: Any,
    *,
    budget_bytes: int,
    lazy: bool,
    pickle: bool,
    backend: Literal["io_uring", "posix"] | None,
    faults: native.Faults | None,
) -> "NativeCheckpointEngine":
    """See `capture.checkpoint_engine`."""
    previous = engine.checkpoint_engine
    if isinstance(previous, NativeCheckpointEngine):
        try:
            previous.close()
        except SnapshotError as error:
            # Of this rank alone: the others are about to wait for it.
            warnings.warn(str(error), stacklevel=3)
    elif previous.is_decoupled():
        raise SetupError(
            f"the engine has {type(previous).__qualname__}, which saves in the background too: leave it out of the configuration"
        )
    if engine.use_node_local_storage():
        raise UnsupportedError(
            "checkpoints in node-local storage can't be proved whole, for no rank sees the others' files: turn off "
            "checkpoint.use_node_local_storage"
        )
    made = NativeCheckpointEngine(
        engine, budget_bytes=budget_bytes, lazy=lazy, pickle=pickle, backend=backend, faults=faults
    )
    _close_at_exit(made)
    return made


class NativeCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """What `capture.checkpoint_engine` installs. Its methods are for the training thread.

    A save that fails is a warning at the next update, save or load, and a SnapshotError from `wait` and `close`; the training
    goes on, and `latest` stays at the tag before.
    """

    def __init__(
        self,
        engine: Any,
        *,
        budget_bytes: int,
        lazy: bool,
        pickle: bool,
        backend: Literal["io_uring", "posix"] | None,
        faults: native.Faults | None,
    ) -> None:
        super().__init__()
        self.name = "DSHistory"
        self._engine = engine
        self._pickle = pickle
        self._make_writer = functools.partial(
            agree_on_writer, backend=backend, budget_bytes=budget_bytes, faults=faults
        )
        self._ranks = Ranks(deepspeed.comm.get_rank(), deepspeed.comm.get_world_size())
        self._session = self._ranks.broadcast(secrets.token_hex(8))
        self._count = 0
        self._writer: ChosenWriter | None = None
        self._shared: dict[Path, int] = {}
        self._saving: Save | None = None
        self._inside = False
        self._unreleased: list[StateWrite] = []
        self._closed = False
        self._saves = Saves(rank=self._ranks.rank, world_size=self._ranks.world_size)
        self._failures = Failures(self._saves.take_failures)
        self._providers, self.eager_because = lazy_providers(engine) if lazy else ([], "lazy=False")
        self._undo = [self._install(engine)]
        if self._providers:
            self._undo.append(attach_barrier(engine, self))
        self._undo.append(_readable_by_zero_to_fp32(self))
        self._undo += [
            wrap(engine, "save_checkpoint", self._around_save),
            wrap(engine, "load_checkpoint", self._around_load),
        ]
        _live.add(self)

    # What DeepSpeed calls.

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a save. SetupError, on all ranks, when they do not see the same folder or no writer can be made."""
        if not self._inside:
            return
        folder = Path(info.save_dir).absolute()
        self._prepare(folder)
        self._count += 1
        self._saving = Save(f"{self._session}-{self._count}", folder, info.tag, info.save_latest)

    def save(self, state_dict: Any, path: str) -> None:
        """Begin to write a file of the save. UnsupportedError names what is no data; a file that can't be made fails the save.

        Outside `save_checkpoint` (`save_16bit_model`) it is for other programs to read, so it is torch.save's, durable at return.
        """
        if self._saving is None:
            save_torch_file(state_dict, Path(path))
            return
        state = encode_state(state_dict, known=DEEPSPEED_CLASSES, pickle=self._pickle)
        assert self._writer is not None, "create comes first"
        try:
            write = StateWrite.start(
                state,
                Path(path).absolute(),
                writer=self._writer.writer,
                steady=steady_storages(self._engine, self._providers),
                align=self._shared[self._saving.folder],
            )
        except OSError as error:
            self._saves.fail(self._saving, error)
            return
        self._unreleased.append(write)
        self._saves.add(self._saving, write)

    def load(self, path: str, map_location: Any = None) -> Any:
        """The state in a file of ours, verified, or in one of torch.save; waits for what this process is still writing.
        FormatError, CorruptError; `map_location` as in torch.load, None keeps ours in host memory.
        """
        _wait_for_all()
        if is_state_file(Path(path)):
            return self._decoded(Path(path), map_location)
        classes = [one.cls for one in DEEPSPEED_CLASSES]
        return load_torch_file(Path(path), map_location=map_location, classes=classes, pickle=self._pickle)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """`wait`; True. `save_checkpoint` does not call it."""
        self.wait()
        return True

    def is_decoupled(self) -> bool:
        """True: what is saved is committed later, and `latest` is not DeepSpeed's to write."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """False: of a tensor that is a part of a larger storage only that part is written, so none needs to be cloned."""
        return False

    def cleanup(self) -> None:
        """`close`."""
        self.close()

    # What the hooks call.

    def before_update(self) -> None:
        """The barrier."""
        self.release()
        self._failures.warn()

    def before_access(self, what: str) -> None:
        """The barrier on other ways to the state."""
        self.release()

    def layout_changed(self) -> None:
        """Nothing is planned ahead."""

    def closing(self) -> None:
        """`cleanup` comes when the engine is destroyed."""

    # For everybody.

    def release(self) -> None:
        """Return once the state may be written to: nothing of it is read any more. The files may not be written yet."""
        for write in self._unreleased:
            write.release()
        self._unreleased.clear()

    def wait(self) -> None:
        """Return once this rank's files are durable; when all ranks have returned, `latest` is moved. SnapshotError when a
        save has failed since the last `wait`.
        """
        self.release()
        self._saves.wait()
        self._failures.raise_all()

    def close(self) -> None:
        """Finish what is pending and put the previous engine back. Idempotent. SnapshotError when a save failed that was
        not warned of yet.
        """
        if self._closed:
            return
        self._closed = True
        self._failures.forget_warned()
        self.release()
        self._saves.close()
        while self._undo:
            self._undo.pop()()
        if self._writer is not None:
            CUDA.unpin(self._writer.writer)
            self._writer.writer.close()
        self._failures.raise_all()

    # The rest.

    def _install(self, engine: Any) -> Callable[[], None]:
        previous, engine.checkpoint_engine = engine.checkpoint_engine, self

        def undo() -> None:
            if engine.checkpoint_engine is self:
                engine.checkpoint_engine = previous

        return undo

    def _around_save(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._failures.warn()
        self._inside = True
        try:
            result = inner(*args, **kwargs)
            if self._saving is not None:
                self._saves.seal(self._saving)
            return result
        finally:
            # Of a call that has raised no receipt is published: it was not sealed.
            self._saving, self._inside = None, False

    def _around_load(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.release()
        _wait_for_all()
        # Whoever finished last has moved `latest` by now, and DeepSpeed may look at it.
        deepspeed.comm.barrier()
        self._failures.warn()
        return inner(*args, **kwargs)

    def _prepare(self, folder: Path) -> None:
        """Once for each folder: that all ranks see it, and how it is to be written."""
        if folder in self._shared:
            return
        self._ranks.prove_shared(folder)
        file_system = native.probe_file_system(str(folder))
        if self._writer is None:
            self._writer = self._make_writer(folder, self._ranks, file_system=file_system)
        self._shared[folder] = int(file_system["place_align"])

    def _decoded(self, path: Path, map_location: Any) -> Any:
        tree, tensors = read_tree(path)
        placed = {name: moved(tensor, map_location) for name, tensor in tensors.items()}
        return decode_state(tree, placed, what=str(path), known=DEEPSPEED_CLASSES, pickle=self._pickle)


def _wait_for_all() -> None:
    """For every engine of this process: what one of them is writing another one may load."""
    for one in list(_live):
        one._saves.wait()


def _readable_by_zero_to_fp32(made: NativeCheckpointEngine) -> Callable[[], None]:
    """For scripts that call it, and for DeepSpeed itself under ZeRO-3 with load_optimizer_states=False."""
    reference = weakref.ref(made)

    def load(path: Path) -> Any:
        alive = reference()
        assert alive is not None, "it is undone by close, which DeepSpeed calls before the engine goes"
        return alive.load(str(path), "cpu")

    return redirect_torch_load(zero_to_fp32, load)


def _close_at_exit(made: NativeCheckpointEngine) -> None:
    reference, owner = weakref.ref(made), os.getpid()

    def close() -> None:
        alive = reference()
        # A forked child has a copy, which must not write into its parent's checkpoint.
        if alive is not None and os.getpid() == owner:
            try:
                alive.close()
            except HistoryError as error:
                warnings.warn("\n".join([str(error), *getattr(error, "__notes__", ())]), stacklevel=1)

    atexit.register(close)
