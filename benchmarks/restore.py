"""Reading a saved training back from a cold page cache: all of it, one layer of it, one tensor.

*Whole* ends when every weight and moment lies in the live training's own tensors. *One layer* is all that belongs to
the middle layer (weights and both moments), *first tensor* one of its weights: both count from the call, so all
that must be opened, listed and parsed first is in them. *Read* is what the process had fetched from the disk meanwhile, by
the kernel's count. DSHistory verifies the checksum of everything it reads; no other contender does.
"""

from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.measure import Rows, Series, clock, fetched_bytes, forget, make_durable, rotations
from benchmarks.readers import READERS, Reader
from benchmarks.training_state import Training, filled, gpt

COLUMNS = {
    "whole": "s",
    "rate": "GB/s",
    "one layer": "s",
    "read for the layer": "MB",
    "first tensor": "s",
    "read for the tensor": "MB",
}


def run(scratch: Path, *, state_bytes: int, times: int) -> tuple[Rows, dict[str, object]]:
    """Every way to read, `times` rotations, interleaved; each has saved the same state into a folder of its own."""
    training = filled(gpt(state_bytes))
    readers: list[Reader] = [make() for make in READERS]
    folders = {reader.name: scratch / str(number) for number, reader in enumerate(readers)}
    for reader in readers:
        folder = folders[reader.name]
        folder.mkdir()
        reader.save(training, folder)
        make_durable(folder)
        _one(reader, training, folder)  # imports and plans what a later call need not
    rows: Rows = {reader.name: defaultdict(Series) for reader in readers}
    for reader in rotations(readers, times=times):
        for figure, value in _one(reader, training, folders[reader.name]).items():
            rows[reader.name][figure].add(value)
    layer, tensor = (
        sum(value.numel() * value.element_size() for value in wanted.values()) for wanted in _wanted(training)
    )
    sizes = {"state_bytes": training.state_bytes(), "layer_bytes": layer, "tensor_bytes": tensor}
    return rows, sizes | {"rotations": times}


def _one(reader: Reader, training: Training, folder: Path) -> dict[str, float]:
    forget(folder)
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
    """One layer and one tensor of it."""
    names, live = training.parameter_names(), training.tensors()
    middle = f"blocks.{len(training.model.blocks) // 2}."
    layer = {key: live[key] for key, name in names.items() if name.startswith(middle)}
    first = f"model/{middle}mlp.0.weight"
    return layer, {first: live[first]}
