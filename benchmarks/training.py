"""A training whose state is saved at every k-th step: the time of a step, and the time for which the loop stands still.

This is the experiment of the DataStates-LLM papers at the size of a small machine: a GPT in fp32 on the CPU, whose
forward, backward and update compete with the writer for the same cores and memory bandwidth. Every turn makes one save
and one step that don't count, then trains a window of steps as out of the middle of a long training: the save before
the window may still be in progress when it begins, and the last save when it ends. *Step* is the window divided by its
steps, including saves. *Against none* compares it with the training without capture of the same rotation. *Stall* is
all the time inside the calls and hooks of the contender, including waits for an earlier save, per save and as a share
of the forward, backward and update of a step. *Write left* is the time from the end of the window until everything is
durable; before that `torch.save` is not forced to the disk. *Close* is what ending the session takes after that. With
*statistics* every checkpoint is also read back and analysed during the training, at the lowest priority, as far as
there is time, and for at most a second when the session is closed. *Raw O_DIRECT* writes as many bytes from one small
buffer in the background: the least that a write of small pages costs a training on this machine, whoever does it.
DSHistory moves the state into huge pages while it first captures; all contenders train the same model, so that from
then on it is in huge pages for those without capture too.
"""

import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.hooks import HookClock
from benchmarks.measure import Rows, Series, clock, make_durable, rotations
from benchmarks.ours import OursEvery
from benchmarks.peers import DistributedAsyncSave, RawDirectBeside, Saver, TorchSave
from benchmarks.training_state import Training, filled, gpt

COLUMNS = {
    "step": "s",
    "against none": "x",
    "forward+backward": "s",
    "stall per save": "s",
    "stall of the step": "%",
    "write left": "s",
    "close": "s",
}


@dataclass(frozen=True)
class Contender:
    """A contender. `steps` of a window is a multiple of `every`, so windows have as many saves as a long training."""

    name: str
    every: int
    steps: int
    make: Callable[[Path], Saver] | None


NONE = "no capture"
CONTENDERS = [
    Contender(NONE, 1, 6, None),
    Contender("DSHistory every 1", 1, 6, lambda root: OursEvery(root, every=1)),
    Contender("DSHistory every 1, statistics", 1, 6, lambda root: OursEvery(root, every=1, stats_every=1)),
    Contender("DSHistory every 2", 2, 6, lambda root: OursEvery(root, every=2)),
    Contender("DSHistory every 5", 5, 5, lambda root: OursEvery(root, every=5)),
    Contender("DSHistory every 10", 10, 10, lambda root: OursEvery(root, every=10)),
    Contender("raw O_DIRECT every 1", 1, 6, lambda _: RawDirectBeside()),
    Contender("torch.save every 1", 1, 4, lambda _: TorchSave()),
    Contender("DCP async_save every 1", 1, 4, lambda _: DistributedAsyncSave()),
]


def run(scratch: Path, *, state_bytes: int, times: int, batch: int) -> tuple[Rows, dict[str, object]]:
    """Measure every contender in `times` rotations on one model that keeps training."""
    training = filled(gpt(state_bytes))
    clock = HookClock(training)
    rows: Rows = {contender.name: defaultdict(Series) for contender in CONTENDERS}
    for contender in rotations(CONTENDERS, times=times):
        for figure, value in _Turn(training, clock, contender, scratch / "training", batch).figures().items():
            rows[contender.name][figure].add(value)
    for figures in rows.values():
        pairs = zip(figures["step"].values, rows[NONE]["step"].values, strict=True)
        figures["against none"] = Series([step / none for step, none in pairs])
    settings = {"state_bytes": training.state_bytes(), "tokens": batch * 128, "rotations": times}
    return rows, settings | {"steps": {contender.name: contender.steps for contender in CONTENDERS}}


class _Turn:
    """The window of one contender on the shared model."""

    def __init__(self, training: Training, hooks: HookClock, contender: Contender, root: Path, batch: int) -> None:
        self.training, self.hooks, self.contender, self.root, self.batch = training, hooks, contender, root, batch
        self.generator = torch.Generator().manual_seed(0)
        self.stalled = self.computed = self.updated = 0.0

    def figures(self) -> dict[str, float]:
        self.root.mkdir()
        make_durable(self.root)
        saver = self.contender.make(self.root) if self.contender.make else None
        if saver is not None:
            saver.ready(self.training)
            self._begin(saver, "first")
            saver.durable()
        self.hooks.seal()
        self._step(saver, 0)
        self.hooks.take()
        self.stalled = self.computed = self.updated = 0.0
        with clock() as window:
            for number in range(1, self.contender.steps + 1):
                self._step(saver, number)
        with clock() as left:
            if saver is not None:
                saver.durable()
        with clock() as close:
            if saver is not None:
                saver.close()
        shutil.rmtree(self.root)
        return self._per_step(window.seconds, left.seconds, close.seconds)

    def _step(self, saver: Saver | None, number: int) -> None:
        tokens = torch.randint(0, 256, (self.batch, 129), generator=self.generator)
        with clock() as compute:
            self.training.optimizer.zero_grad()
            self.training.model(tokens[:, :-1], tokens[:, 1:]).backward()
        of_forward = self.hooks.take()
        self.computed += compute.seconds - of_forward
        waiting = time.perf_counter()
        if saver is not None:
            saver.before_update()
        waited = time.perf_counter() - waiting
        with clock() as update:
            self.training.update()
        of_update = self.hooks.take()
        self.updated += update.seconds - of_update
        with clock() as call:
            if saver is not None and number % self.contender.every == 0:
                self._begin(saver, str(number))
        self.stalled += of_forward + waited + of_update + call.seconds

    def _begin(self, saver: Saver, name: str) -> None:
        folder = self.root / name
        folder.mkdir()
        saver.begin(self.training, folder)

    def _per_step(self, window_s: float, left_s: float, close_s: float) -> dict[str, float]:
        steps, saves = self.contender.steps, self.contender.steps // self.contender.every
        figures = {"step": window_s / steps, "forward+backward": self.computed / steps}
        if self.contender.make is None:
            return figures
        own = self.computed + self.updated
        return figures | {
            "stall per save": self.stalled / saves,
            "stall of the step": self.stalled / own,
            "write left": left_s,
            "close": close_s,
        }
