"""DeepSpeed's CheckpointEngine interface over the native writer, installed on a live engine.

DeepSpeed has a protocol for engines that write in the background: at the next `engine.step` it asks `get_commit_info`
for a pending save, commits it there, and writes `latest`. This engine does not use it, for three reasons. A pipeline's
`train_batch` never reaches that code, so such a save would never be committed. The training would wait there for the
disk. And `latest` would move as soon as rank 0 has committed, whatever the other ranks still have to write.

So `get_commit_info` keeps its default, None, and a save is committed in the background: `saves` moves `latest` once the
files of all ranks are durable. What the training does wait for, before an update, is only that its memory has been
read: the barrier, a hook on the optimizer's own `step`, which every kind of engine calls.
"""

import contextlib
import secrets
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.checkpoint import deepspeed_checkpoint, ds_to_universal, zero_checkpoint
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.utils import zero_to_fp32

import native
from capture.collectives import Ranks
from capture.deepspeed_checkpoints.classes import DEEPSPEED_CLASSES
from capture.deepspeed_checkpoints.file import FileWrite, is_tree_file, read_tree
from capture.deepspeed_checkpoints.fp32_program import leave_program
from capture.deepspeed_checkpoints.lazy_memory import lazy_providers, lazy_storages
from capture.deepspeed_checkpoints.options import EngineOptions
from capture.deepspeed_checkpoints.saves import Save, Saves
from capture.deepspeed_checkpoints.torch_files import (
    load_torch_file,
    redirect_torch_load,
    save_torch_file,
    to_map_location,
)
from capture.deepspeed_checkpoints.tree import decode_tree, encode_tree
from capture.devices.copies import CUDA
from capture.exit_handler import call_at_exit
from capture.loops.deepspeed.hooks import attach_barrier
from capture.loops.module_hooks import wrap
from capture.snapshot.failures import Failures
from capture.snapshot.writer_choice import ChosenWriter, agree_on_writer
from capture.user_warning import warn_user
from catalog.errors import SetupError, SnapshotError, UnsupportedError

__all__ = ["NativeCheckpointEngine", "install"]

# What of DeepSpeed reads checkpoints with torch.load instead of the engine: zero_to_fp32, which DeepSpeed itself calls
# too, for ZeRO-3 weights with load_optimizer_states=False; and ds_to_universal with the two modules that it reads with.
_READERS = (zero_to_fp32, ds_to_universal, deepspeed_checkpoint, zero_checkpoint)
_open_engines: weakref.WeakSet["NativeCheckpointEngine"] = weakref.WeakSet()


def install(
    engine: Any,
    options: EngineOptions,
) -> "NativeCheckpointEngine":
    """Install a NativeCheckpointEngine on `engine`, as `capture.checkpoint_engine` documents."""
    previous = engine.checkpoint_engine
    if isinstance(previous, NativeCheckpointEngine):
        try:
            previous.close()
        except SnapshotError as error:
            # A warning, not an error: the failure may be this rank's alone, and the other ranks are about to enter the
            # collectives of the installation.
            warn_user(str(error))
    elif previous.is_decoupled():
        raise SetupError(
            f"the engine has {type(previous).__qualname__}, which saves in the background too: leave it out of the "
            "configuration"
        )
    if engine.use_node_local_storage():
        raise UnsupportedError(
            "checkpoints in node-local storage can't be proved whole, because no rank sees the other ranks' files: "
            "turn off checkpoint.use_node_local_storage"
        )
    made = NativeCheckpointEngine(engine, options)
    call_at_exit(made, NativeCheckpointEngine.close)
    return made


class NativeCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The checkpoint engine that `capture.checkpoint_engine` installs. Its methods are for the training thread.

    A save that fails is reported as a warning at the next update, save or load or at `close`, in `failures`, and as a
    SnapshotError from `wait`. The training goes on, and `latest` keeps naming the tag before.
    """

    def __init__(
        self,
        engine: Any,
        options: EngineOptions,
    ) -> None:
        super().__init__()
        self.name = "DSHistory"
        self._engine = engine
        self._options = options
        self._ranks = Ranks(deepspeed.comm.get_rank(), deepspeed.comm.get_world_size())
        # Part of every save's id, so that receipts of an earlier process under the same tag do not count.
        self._session = self._ranks.broadcast(secrets.token_hex(8))
        self._saves_begun = 0
        self._writer: ChosenWriter | None = None
        self._align: dict[Path, int] = {}
        self._current: Save | None = None
        self._inside_save = False
        self._refused: Exception | None = None
        self._unreleased: list[FileWrite] = []
        self._closed = False
        self._saves = Saves(rank=self._ranks.rank, world_size=self._ranks.world_size)
        self._failures = Failures(self._saves.take_failures)
        self._providers, self.eager_because = lazy_providers(engine) if options.lazy else ([], "lazy=False")
        self._undo = [self._install(engine)]
        if self._providers:
            self._undo.append(attach_barrier(engine, self))
        self._undo += _readable_by_deepspeed(self)
        self._undo += [
            wrap(engine, "save_checkpoint", self._around_save),
            wrap(engine, "load_checkpoint", self._around_load),
        ]
        _open_engines.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return (
            f"<NativeCheckpointEngine of {type(self._engine).__qualname__}: {self._saves_begun} saves, "
            f"{len(self.failures)} failed, {state}>"
        )

    # The interface of DeepSpeed's CheckpointEngine.

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a save. SetupError, on all ranks, when they do not see the same folder or can't make a writer."""
        # save_16bit_model calls this too. It writes one file, on rank 0, and no checkpoint that could become `latest`.
        if not self._inside_save:
            return
        folder = Path(info.save_dir).absolute()
        self._prepare(folder)
        self._saves_begun += 1
        self._current = Save(f"{self._session}-{self._saves_begun}", folder, info.tag, info.save_latest)

    def save(self, state_dict: Any, path: str) -> None:
        """Begin to write a file of the save that `create` began.

        UnsupportedError, raised by `save_checkpoint` on all ranks, names a value that can't be stored as data. A file
        that can't be created makes the save fail. Outside `save_checkpoint`, that is in `save_16bit_model`, other
        programs will read the file: it is then in torch.save's format, and durable when this returns.
        """
        if self._current is None:
            save_torch_file(state_dict, Path(path))
            return
        assert self._writer is not None, "create comes first"
        try:
            tree = encode_tree(state_dict, known=DEEPSPEED_CLASSES, pickle=self._options.pickle)
            write = FileWrite.start(
                tree,
                Path(path).absolute(),
                writer=self._writer.writer,
                lazy_storages=lazy_storages(self._engine, self._providers),
                align=self._align[self._current.folder],
            )
        except OSError as error:
            # Not raised: DeepSpeed's next collective would then wait for this rank forever. The missing receipt keeps
            # `latest` where it is.
            self._saves.fail(self._current, error)
            return
        except Exception as error:  # noqa: BLE001 - raised when DeepSpeed has left its last collective of the save
            self._refused = self._refused or error
            return
        self._unreleased.append(write)
        self._saves.add(self._current, write)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the state in a file of this engine, verified, or in one of torch.save.

        Waits first for everything that this process is still writing. `map_location` means what it does in torch.load,
        except that None keeps the tensors of our files in host memory. FormatError, CorruptError.
        """
        _wait_for_all()
        if is_tree_file(Path(path)):
            return self._decoded(Path(path), map_location)
        classes = [one.cls for one in DEEPSPEED_CLASSES]
        return load_torch_file(Path(path), map_location=map_location, classes=classes, pickle=self._options.pickle)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Call `wait` and return True. Only `save_16bit_model` calls this: a decoupled `save_checkpoint` does not."""
        self.wait()
        return True

    def is_decoupled(self) -> bool:
        """Return True: saves are committed later. It also stops `save_checkpoint` from writing `latest` itself."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return False: a view of a larger storage is written without the rest of it.

        torch.save would write the whole storage, which is why DeepSpeed clones tensors for engines that return True.
        """
        return False

    def cleanup(self) -> None:
        """Call `close`. DeepSpeed does when the engine is destroyed."""
        self.close()

    # The interface of the hooks, `capture.loops.interface.Barrier`.

    def before_update(self) -> None:
        """Run the barrier before an update writes the state, and warn of saves that have failed."""
        self.release()
        self._failures.warn()

    def before_access(self, what: str) -> None:
        """Run the barrier before anything else that writes or moves the state."""
        self.release()

    @contextlib.contextmanager
    def editing(self, what: str) -> Iterator[None]:
        """Run the barrier before an edit."""
        self.release()
        yield

    def layout_changed(self) -> None:
        """Do nothing: every save lists the memory anew."""

    def closing(self) -> None:
        """Do nothing: DeepSpeed calls `cleanup` when the engine is destroyed."""

    # The interface for users.

    @property
    def failures(self) -> list[SnapshotError]:
        """Every failed save so far, in order, whether a warning or an error has reported it or not."""
        return self._failures.all()

    def release(self) -> None:
        """Return once none of the state is read any more, so that it may be written to. The files may be incomplete."""
        for write in self._unreleased:
            write.release()
        self._unreleased.clear()

    def wait(self) -> None:
        """Return once this rank's files are durable. When it has returned on all ranks, `latest` has been moved.

        SnapshotError when a save has failed since the last `wait`.
        """
        self.release()
        self._saves.wait()
        self._failures.raise_all()

    def close(self) -> None:
        """Finish pending saves and put the previous engine back. Idempotent.

        A save that failed is a warning. With `strict=True`: SnapshotError for what no `wait` has raised.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.release()
            self._saves.close()
        except KeyboardInterrupt:
            # Nothing is dropped: the saves go on, and a second call waits for them again.
            self._closed = False
            raise
        while self._undo:
            self._undo.pop()()
        if self._writer is not None:
            CUDA.unpin(self._writer.writer)
            self._writer.writer.close()
        if self._options.strict:
            self._failures.raise_all()
        self._failures.warn()

    # Internals.

    def _install(self, engine: Any) -> Callable[[], None]:
        previous, engine.checkpoint_engine = engine.checkpoint_engine, self

        def undo() -> None:
            if engine.checkpoint_engine is self:
                engine.checkpoint_engine = previous

        return undo

    def _around_save(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._failures.warn()
        self._inside_save = True
        try:
            result = inner(*args, **kwargs)
            if self._current is not None:
                # Of a replicated training the first rank alone writes what the user gives.
                self._ranks.agree(f"the save {self._current.tag_folder}", self._raise_refused)
                self._leave_program(self._current)
                # Only here are all files of the save known to have been begun, on a path that no exception has left.
                # From here on the background thread commits it: nothing waits, and no later call of DeepSpeed is
                # needed.
                self._saves.complete(self._current)
                if self._options.wait:
                    # The rank whose files are durable last moves `latest`, before its own wait ends.
                    self._ranks.agree(f"the save {self._current.tag_folder}", self.wait)
            return result
        finally:
            # A call that raised has not completed its save, so the save leaves no receipt and never becomes `latest`.
            self._current, self._inside_save, self._refused = None, False, None

    def _raise_refused(self) -> None:
        if self._refused is not None:
            raise self._refused

    def _leave_program(self, save: Save) -> None:
        if self._ranks.rank == 0:
            try:
                leave_program(save.folder)
            except OSError as error:
                # As for a file that can't be created: the other ranks go on to a collective.
                self._saves.fail(save, error)

    def _around_load(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.release()
        _wait_for_all()
        # Every rank has finished its saves when all have come here, so `latest` is where it will stay, and DeepSpeed
        # may read it. Before the barrier a rank could still find the tag before.
        deepspeed.comm.barrier()
        self._failures.warn()
        return inner(*args, **kwargs)

    def _prepare(self, folder: Path) -> None:
        """Once for each folder, check that all ranks see it and note its alignment; make a writer for the first."""
        if folder in self._align:
            return
        self._ranks.prove_shared(folder)
        file_system = self._ranks.agree(
            f"looking at the file system of {folder}", lambda: native.probe_file_system(str(folder))
        )
        if self._writer is None:
            self._writer = agree_on_writer(folder, self._ranks, options=self._options.writer, file_system=file_system)
        self._align[folder] = int(file_system["place_align"])

    def _decoded(self, path: Path, map_location: Any) -> Any:
        json, tensors = read_tree(path)
        placed = {name: to_map_location(tensor, map_location) for name, tensor in tensors.items()}
        return decode_tree(json, placed, what=str(path), known=DEEPSPEED_CLASSES, pickle=self._options.pickle)


def _wait_for_all() -> None:
    """Wait for every engine of this process: one may load what another is still writing."""
    for one in list(_open_engines):
        one._saves.wait()


def _readable_by_deepspeed(made: NativeCheckpointEngine) -> list[Callable[[], None]]:
    """Let DeepSpeed's programs read our files when this process calls them; return functions that undo it."""
    reference = weakref.ref(made)

    def load(path: Path) -> Any:
        alive = reference()
        assert alive is not None, "close undoes the redirection, and DeepSpeed calls it before the engine goes"
        return alive.load(str(path), "cpu")

    return [redirect_torch_load(module, load) for module in _READERS]
