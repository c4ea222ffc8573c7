"""One save of a gigabyte and more: time the loop is blocked, time until durable, a cold read back, extra memory.

Each turn saves twice. First with nothing else going on: durable counts from the save call to the last fsync, folders
included; then that checkpoint is put back into the live training from a cold page cache. The second save is followed
by a wait of `window_s`, as for an accelerator that computes forward and backward, and by an update of every weight:
blocked is the time inside the save call plus whatever has to wait before that update. Extra memory is the peak during the
first save plus what its first use left behind.
"""

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils.hooks import RemovableHandle

from benchmarks.measure import PeakMemory, Series, clock, forget, make_durable, resident_bytes, rotations
from benchmarks.ours import Ours
from benchmarks.peers import (
    DistributedAsyncSave,
    DistributedSave,
    RawDirect,
    Safetensors,
    Saver,
    TorchSave,
    TorchSnapshot,
)
from benchmarks.training_state import Training, filled, gpt

COLUMNS = {"blocked": "s", "durable": "s", "rate": "GB/s", "cold read": "s", "extra memory": "MB"}
Rows = dict[str, dict[str, Series]]


class BarrierClock:
    """Time between the first and the last hook that runs before an update: what stands between them waits there."""

    def __init__(self, training: Training) -> None:
        self.optimizer = training.optimizer
        self.seconds = 0.0
        self.sealed: RemovableHandle | None = None
        self.optimizer.register_step_pre_hook(self._first)

    def seal(self) -> None:
        """Everything registered so far stands between the two hooks from now on."""
        if self.sealed is not None:
            self.sealed.remove()
        self.sealed = self.optimizer.register_step_pre_hook(self._last)

    def _first(self, *_: object) -> None:
        self.started = time.perf_counter()

    def _last(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.started


def run(scratch: Path, *, state_bytes: int, times: int, window_s: float) -> tuple[Rows, dict[str, object]]:
    """Every way to save, `times` rotations, interleaved."""
    training = filled(gpt(state_bytes))
    barrier = BarrierClock(training)
    makers: list[Callable[[], Saver]] = [
        lambda: Ours(scratch),
        RawDirect,
        TorchSave,
        Safetensors,
        DistributedSave,
        DistributedAsyncSave,
        TorchSnapshot,
    ]
    savers, kept = [], {}
    for make in makers:  # first calls import, allocate and plan: not measured but for the memory that stays
        before = resident_bytes()
        saver = make()
        with _new_folder(saver, training, barrier, scratch) as folder:
            saver.begin(training, folder)
            saver.durable()
        kept[saver.name] = max(0, resident_bytes() - before)
        savers.append(saver)
    rows: Rows = {saver.name: defaultdict(Series) for saver in savers}
    for saver in rotations(savers, times=times):
        for name, value in _one(saver, training, barrier, scratch, window_s=window_s).items():
            rows[saver.name][name].add(value + (kept[saver.name] if name == "extra memory" else 0))
    for saver in savers:
        saver.close()
    facts = {"state_bytes": training.state_bytes(), "tensors": len(training.tensors())}
    return rows, facts | {"rotations": times, "window_s": window_s}


def _one(
    saver: Saver, training: Training, barrier: BarrierClock, scratch: Path, *, window_s: float
) -> dict[str, float]:
    memory = PeakMemory()
    with _new_folder(saver, training, barrier, scratch) as folder:
        memory.start()
        with clock() as durable:
            saver.begin(training, folder)
            saver.durable()
        extra = memory.extra_bytes()
        forget(saver.history if isinstance(saver, Ours) else folder)
        with clock() as load:
            saver.load(training)
    with _new_folder(saver, training, barrier, scratch) as folder:
        with clock() as call:
            saver.begin(training, folder)
        time.sleep(max(0.0, window_s - call.seconds))
        with clock() as wait:
            saver.before_update()
        training.update()
        waited = barrier.seconds if isinstance(saver, Ours) else wait.seconds
        saver.durable()
    return {
        "blocked": call.seconds + waited,
        "durable": durable.seconds,
        "rate": training.state_bytes() / durable.seconds,
        "cold read": load.seconds,
        "extra memory": extra,
    }


@contextmanager
def _new_folder(saver: Saver, training: Training, barrier: BarrierClock, scratch: Path) -> Iterator[Path]:
    """A changed state, an empty folder for it, and a disk that owes nothing to the turn before."""
    saver.ready(training)
    barrier.seal()
    training.update()
    folder = scratch / "save"
    folder.mkdir()
    make_durable(scratch)
    yield folder
    shutil.rmtree(folder)
