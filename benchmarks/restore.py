"""Reading a saved training from a cold page cache: all of it, one layer of it, one tensor.

*Whole* ends when every weight and moment is in the live training's own tensors. *Against reading once* compares a
restore that verifies everything first with the one of the same rotation that compares checksums while it overwrites;
*memory at hand* frees as much memory right before, which a virtual machine may otherwise have to get from its host.
*One layer* is everything that belongs to the middle layer (weights and both moments), and *first tensor* is one of its
weights. Both are measured from the
call, so they include everything that must be opened, listed and parsed first. *Read* is the number of bytes that the
kernel read from the disk for the process meanwhile. DSHistory verifies the checksum of everything it reads; no other
contender does.
"""

from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.measure import Rows, Series, clock, fetched_bytes, forget, make_durable, rotations
from benchmarks.readers import READERS, OursReader, OursVerifiedAtHandReader, OursVerifiedReader, Reader
from benchmarks.training_state import Training, filled, gpt

COLUMNS = {
    "whole": "s",
    "against reading once": "x",
    "rate": "GB/s",
    "one layer": "s",
    "read for the layer": "MB",
    "first tensor": "s",
    "read for the tensor": "MB",
}


def run(scratch: Path, *, state_bytes: int, times: int) -> tuple[Rows, dict[str, object]]:
    """Measure every way to read in `times` interleaved rotations; each has saved the same state into its own folder."""
    training = filled(gpt(state_bytes))
    readers: list[Reader] = [make() for make in READERS]
    folders = {reader.name: scratch / str(number) for number, reader in enumerate(readers)}
    for reader in readers:
        folder = folders[reader.name]
        folder.mkdir()
        reader.save(training, folder)
        make_durable(folder)
        _one(reader, training, folder)  # the first call imports and plans
    rows: Rows = {reader.name: defaultdict(Series) for reader in readers}
    for reader in rotations(readers, times=times):
        for figure, value in _one(reader, training, folders[reader.name]).items():
            rows[reader.name][figure].add(value)
    once = rows[OursReader.name]["whole"].values
    for reader in (OursVerifiedReader, OursVerifiedAtHandReader):
        pairs = zip(rows[reader.name]["whole"].values, once, strict=True)
        rows[reader.name]["against reading once"] = Series([verified / alone for verified, alone in pairs])
    layer, tensor = (
        sum(value.numel() * value.element_size() for value in wanted.values()) for wanted in _wanted(training)
    )
    sizes = {"state_bytes": training.state_bytes(), "layer_bytes": layer, "tensor_bytes": tensor}
    return rows, sizes | {"rotations": times}


def _one(reader: Reader, training: Training, folder: Path) -> dict[str, float]:
    forget(folder)
    if isinstance(reader, OursVerifiedAtHandReader):
        reader.free_memory(training)
    with clock() as whole:
        reader.whole(training)
    figures = {"whole": whole.seconds, "rate": training.state_bytes() / whole.seconds}
    for wanted, name, read in zip(
        _wanted(training), ("one layer", "first tensor"), ("read for the layer", "read for the tensor"), strict=True
    ):
        forget(folder)
        before = fetched_bytes()
        with clock() as some:
            reader.some(wanted)
        figures |= {name: some.seconds, read: fetched_bytes() - before}
    return figures


def _wanted(training: Training) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the names of one layer and of one tensor in it."""
    names, live = training.parameter_names(), training.tensors()
    middle = f"blocks.{len(training.model.blocks) // 2}."
    layer = {key: live[key] for key, name in names.items() if name.startswith(middle)}
    first = f"model/{middle}mlp.0.weight"
    return layer, {first: live[first]}
