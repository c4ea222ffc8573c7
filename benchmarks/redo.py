"""The redo log of a training: its size, what it costs the training, and how fast a step is made again.

A GPT trains on the CPU with AdamW, in fp32, in mixed precision (a DeepSpeed engine with bf16 weights and gradients, and
fp32 masters and moments; once more with gradients that are clipped, which are no bf16 numbers then), or wholly in bf16,
beside a redo log, beside full captures of every step, and without capture, in turn. *Step* is a window of a training
divided by its steps; *against none* compares it with the training without capture of the same rotation. *Of the state*
is what a step takes on the disk, as a share of weights and moments; in mixed precision, of the 12 bytes a parameter
that a checkpoint has. *Made again* is the time that one more step takes a restore from the log, and *than trained* how
many times as fast that is as a step of the training without capture. The checkpoints before and after the window count
nowhere, but for the full captures of every step. *As many raw bytes* writes at each step what the log has written, in
whole blocks of 8 MiB from one small buffer, by O_DIRECT in the background: the least that a log of this size costs a
training on this machine, whoever makes it. A processor without AVX-512 multiplies bf16 matrices some seventy times as
slowly as those of float32: there only fp32 is measured.
"""

import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import capture
from benchmarks.kept_trainings import KeptTraining, kept_trainings
from benchmarks.measure import Rows, Series, clock, rotations
from benchmarks.peers import RawDirectBeside
from benchmarks.peers_grouped import end_group
from examples.gpt.model import processor_multiplies_bf16

COLUMNS = {
    "step": "s",
    "against none": "x",
    "of the state": "%",
    "made again": "s",
    "than trained": "x",
}


@dataclass(frozen=True)
class Contender:
    """One way to keep every step of a training in one precision; without options, to capture none."""

    name: str
    precision: str
    options: Mapping[str, Any] | None

    @property
    def label(self) -> str:
        return f"{self.precision}, {self.name}"


NONE, LOG, WHOLE, RAW = "no capture", "redo log", "every step whole", "as many raw bytes"
PRECISIONS = ("fp32", "mixed", "mixed clipped", "bf16")
_FAR = 1_000_000
_OPTIONS: dict[str, dict[str, Any] | None] = {
    NONE: None,
    LOG: {"every": _FAR, "redo": True},
    RAW: None,
    WHOLE: {"every": 1},
}
CONTENDERS = [Contender(name, precision, options) for precision in PRECISIONS for name, options in _OPTIONS.items()]


def run(scratch: Path, *, state_bytes: int, times: int, steps: int, batch: int) -> tuple[Rows, dict[str, object]]:
    """Measure every contender in `times` rotations, on one model for each precision that keeps training."""
    here = [contender for contender in CONTENDERS if contender.precision == "fp32" or processor_multiplies_bf16()]
    trainings = kept_trainings(state_bytes, [contender.precision for contender in here])
    rows: Rows = {contender.label: defaultdict(Series) for contender in here}
    for contender in rotations(here, times=times):
        training, row = trainings[contender.precision], rows[contender.label]
        if contender.name == RAW:
            shares = rows[f"{contender.precision}, {LOG}"]["of the state"].values
            # In a rotation that begins here, the log of the rotation before tells how much it writes.
            nbytes = round(shares[-1] * training.state_bytes())
            figures = _beside_raw_bytes(training, nbytes, scratch, steps=steps, batch=batch)
        else:
            figures = _figures(training, contender, scratch / "history", steps=steps, batch=batch)
        for figure, value in figures.items():
            row[figure].add(value)
    for contender in here:
        none, row = rows[f"{contender.precision}, {NONE}"]["step"].values, rows[contender.label]
        row["against none"] = Series([step / base for step, base in zip(row["step"].values, none, strict=True)])
        if "made again" in row:
            pairs = zip(none, row["made again"].values, strict=True)
            row["than trained"] = Series([trained / again for trained, again in pairs])
    sizes = {precision: training.state_bytes() for precision, training in trainings.items()}
    for training in trainings.values():
        training.close()
    end_group()
    skipped = {one.precision: "not on this processor" for one in CONTENDERS if one not in here}
    settings = {"state_bytes": sizes, "tokens": batch * 128, "steps": steps, "rotations": times}
    return rows, settings | {"skipped": skipped}


def _figures(training: KeptTraining, contender: Contender, root: Path, *, steps: int, batch: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    # The first steps of a model are no figure: AdamW has no state yet.
    _steps(training, 2, batch, generator)
    session = None
    if contender.options is not None:
        session = training.enable(root, stats_every=0, **contender.options)
        _steps(training, 1, batch, generator)
        session.wait()
    with clock() as window:
        _steps(training, steps, batch, generator)
    figures = {"step": window.seconds / steps}
    if session is not None:
        first = session.step
        session.close()
        figures |= _of_history(training, contender, root, session, steps=steps, last=first - 1)
        shutil.rmtree(root)
    return figures


def _beside_raw_bytes(
    training: KeptTraining, nbytes: int, scratch: Path, *, steps: int, batch: int
) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    _steps(training, 2, batch, generator)
    writing = RawDirectBeside()
    with clock() as window:
        for step in range(steps):
            folder = scratch / f"raw-{step}"
            folder.mkdir()
            _steps(training, 1, batch, generator)
            writing.write(nbytes, folder)
    writing.durable()
    writing.close()
    for step in range(steps):
        shutil.rmtree(scratch / f"raw-{step}")
    return {"step": window.seconds / steps}


def _of_history(
    training: KeptTraining, contender: Contender, root: Path, session: capture.Session, *, steps: int, last: int
) -> dict[str, float]:
    folder = root / "runs" / session.run
    kept = folder / ("redo" if "redo" in (contender.options or {}) else "steps")
    written = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    if kept.name == "steps":
        return {"of the state": written / len(list(kept.iterdir())) / training.state_bytes()}
    begin = last - steps + 1
    seconds = []
    for step in (begin, last):
        with clock() as rebuilding:
            capture.restore(step, history=root)
        seconds.append(rebuilding.seconds)
    again = (seconds[1] - seconds[0]) / (last - begin)
    return {"of the state": written / (steps + 1) / training.state_bytes(), "made again": again}


def _steps(training: KeptTraining, count: int, batch: int, generator: torch.Generator) -> None:
    for _ in range(count):
        training.step(torch.randint(0, 256, (batch, 129), generator=generator))
