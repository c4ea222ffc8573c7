"""`capture.checkpoint_engine`: one call sends a script's save_checkpoint through the native writer."""

import sys
from typing import TYPE_CHECKING, Any, Literal

from capture.defaults import DEFAULT_BUDGET_BYTES
from catalog.argument_names import knows_its_arguments
from catalog.errors import SetupError

if TYPE_CHECKING:
    from capture.deepspeed_checkpoints.engine import NativeCheckpointEngine

__all__ = ["checkpoint_engine"]


@knows_its_arguments
def checkpoint_engine(
    engine: Any,
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    lazy: bool = True,
    pickle: bool = False,
    backend: Literal["io_uring", "posix"] | None = None,
    wait: bool = False,
    strict: bool = False,
) -> "NativeCheckpointEngine":
    """Send `save_checkpoint` and `load_checkpoint` of a DeepSpeed engine through the native writer from now on.

    Guarantees that a save holds the state at the call, bit for bit, under the names that DeepSpeed gives its files;
    that `latest` names a checkpoint only when all files of all ranks are durable; and that loading never runs code from
    a file unless `pickle` allows it. `save_checkpoint` returns before the files are written; `load_checkpoint` waits
    for them. The program `zero_to_fp32.py` in the folder reads them where DSHistory is installed, and so do DeepSpeed's
    `zero_to_fp32` and `ds_to_universal` when this process calls them; `dshistory convert` makes an ordinary folder for
    everybody else. The files are not in torch.save's format: read one with `load` of the engine that is returned.

    engine: the engine that `deepspeed.initialize` returned. All ranks must call this, and all must see the same
    folders.
    budget_bytes: the staging memory, the only memory taken beyond the training's own. It is kept from the first save to
       `close` or `engine.destroy()`: DeepSpeed does not let go of an engine that nobody uses any more.
    lazy: read memory that only an update changes until the next update. Edits of your own before that update must come
       after `engine.checkpoint_engine.release()`; otherwise they make the save fail by name, where torch counts them.
       False: copy everything at the call, which holds up the training until the copies have room.
    pickle: pickle objects that can't be stored as data, and unpickle them when loading, which runs code that the file
       chooses.
    backend: the writer's backend; by default io_uring where the host allows it, else POSIX threads.
    wait: whether `save_checkpoint` returns only when the files of all ranks are durable and `latest` is moved, and
       raises when a save has failed. For scripts that read, copy or upload the files right after the call.
    strict: whether `close` raises SnapshotError when a save has failed. By default that is a warning.

    Returns the engine that is now `engine.checkpoint_engine`. Its `wait` returns when everything is durable; its
    `close` puts the previous engine back. Installing a second time closes the first. Raises SetupError,
    UnsupportedError.
    """
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is None or not isinstance(engine, deepspeed.DeepSpeedEngine):
        raise SetupError(
            f"expected a DeepSpeed engine, got {type(engine).__qualname__}: pass the engine that "
            "deepspeed.initialize returned"
        )
    from capture.deepspeed_checkpoints.engine import install
    from capture.deepspeed_checkpoints.options import EngineOptions
    from capture.snapshot.writer_choice import WriterOptions

    return install(
        engine,
        EngineOptions(
            writer=WriterOptions(backend=backend, budget_bytes=budget_bytes),
            lazy=lazy,
            pickle=pickle,
            wait=wait,
            strict=strict,
        ),
    )
