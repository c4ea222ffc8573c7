"""One save of a gigabyte or more: time the loop is blocked, time until durable, a cold read back, extra memory.

Each turn saves twice. The first save runs alone, and *durable* is the time from the save call to the last fsync,
including folders. That checkpoint is then loaded into the live training from a cold page cache, in one pass that
verifies checksums on the way (`verify=False`). The second save is followed by a wait of `window_s`, in place of an
accelerator that computes forward and backward, and by an update of every weight. *Blocked* is the time inside the save
call plus the time for which this update has to wait. Extra memory is the peak during the first save plus the memory
that the first use left behind, in the training's own process. Orbax runs in a separate process, because it needs
another environment, and its arrays are JAX's; its figure is the memory of that process.
"""

import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.hooks import HookClock
from benchmarks.measure import PeakMemory, Rows, Series, clock, forget, make_durable, resident_bytes, rotations
from benchmarks.ours import Ours
from benchmarks.peer_orbax import Orbax
from benchmarks.peers import (
    DistributedAsyncSave,
    DistributedSave,
    RawDirect,
    Safetensors,
    Saver,
    TorchSave,
    TorchSnapshot,
    UnavailableError,
)
from benchmarks.peers_grouped import DeepSpeedSave, DistributedProcessSave, end_group
from benchmarks.training_state import Training, filled, gpt

COLUMNS = {"blocked": "s", "durable": "s", "rate": "GB/s", "cold read": "s", "extra memory": "MB"}
PEERS = (
    TorchSave,
    Safetensors,
    DistributedSave,
    DistributedAsyncSave,
    DistributedProcessSave,
    TorchSnapshot,
    DeepSpeedSave,
)


def run(scratch: Path, *, state_bytes: int, times: int, window_s: float) -> tuple[Rows, dict[str, object]]:
    """Measure every way to save in `times` interleaved rotations."""
    training = filled(gpt(state_bytes))
    hooks = HookClock(training)
    rows: Rows = {}
    savers: list[Saver | Orbax] = []
    kept: dict[str, float] = {}
    skipped: dict[str, str] = {}
    # First calls import, allocate and plan. Only the memory that they leave behind is measured.
    for way in (Ours, RawDirect, *PEERS):
        try:
            saver = Ours(scratch) if way is Ours else way()
        except UnavailableError as error:
            skipped[way.name] = str(error)
            continue
        before = resident_bytes()
        with _new_folder(saver, training, hooks, scratch) as folder:
            saver.begin(training, folder)
            saver.durable()
        kept[saver.name] = max(0, resident_bytes() - before)
        savers.append(saver)
    try:
        savers.append(Orbax(training, scratch))
    except UnavailableError as error:
        skipped[Orbax.name] = str(error)
    for saver in rotations(savers, times=times):
        row = rows.setdefault(saver.name, defaultdict(Series))
        for name, value in _figures(saver, training, hooks, scratch, window_s=window_s).items():
            row[name].add(value + (kept.get(saver.name, 0) if name == "extra memory" else 0))
        row["rate"].add(training.state_bytes() / row["durable"].values[-1])
    for saver in savers:
        saver.close()
    end_group()
    facts = {"state_bytes": training.state_bytes(), "tensors": len(training.tensors()), "skipped": skipped}
    return rows, facts | {"rotations": times, "window_s": window_s}


def _figures(
    saver: Saver | Orbax, training: Training, hooks: HookClock, scratch: Path, *, window_s: float
) -> dict[str, float]:
    if isinstance(saver, Orbax):
        return saver.turn(window_s=window_s)
    return _one(saver, training, hooks, scratch, window_s=window_s)


def _one(saver: Saver, training: Training, hooks: HookClock, scratch: Path, *, window_s: float) -> dict[str, float]:
    memory = PeakMemory()
    with _new_folder(saver, training, hooks, scratch) as folder:
        memory.start()
        with clock() as durable:
            saver.begin(training, folder)
            saver.durable()
        extra = memory.extra_bytes()
        forget(saver.history if isinstance(saver, Ours) else folder)
        with clock() as load:
            saver.load(training)
    with _new_folder(saver, training, hooks, scratch) as folder:
        with clock() as call:
            saver.begin(training, folder)
        time.sleep(max(0.0, window_s - call.seconds))
        hooks.take()
        with clock() as wait:
            saver.before_update()
        training.update()
        waited_in_hooks = hooks.take()
        saver.durable()
    return {
        "blocked": call.seconds + wait.seconds + waited_in_hooks,
        "durable": durable.seconds,
        "cold read": load.seconds,
        "extra memory": extra,
    }


@contextmanager
def _new_folder(saver: Saver, training: Training, hooks: HookClock, scratch: Path) -> Iterator[Path]:
    """Prepare a save: change the state, create an empty folder, and wait until earlier writes are on the disk."""
    saver.ready(training)
    hooks.seal()
    training.renew_gradients()
    training.update()
    folder = scratch / "save"
    folder.mkdir()
    make_durable(scratch)
    yield folder
    shutil.rmtree(folder)
