"""Tiny histories with torch tensors, written with the catalog's own writer, and a shell for tests of the explorer."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import catalog_helpers
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from capture.state.dtypes import dtype_name
from catalog.records import Placement
from dshistory.explorer import Explorer


@dataclass(frozen=True)
class Piece:
    """One fragment, as a rank writes it."""

    name: str
    tensor: torch.Tensor
    kind: str = "model"
    shape: tuple[int, ...] | None = None
    start: int = 0
    placement: Placement = "replicated"
    aliases: tuple[str, ...] = ()


def whole(tensors: Mapping[str, torch.Tensor], *, kind: str = "model") -> list[Piece]:
    """Return each tensor as one piece."""
    return [Piece(name, tensor, kind) for name, tensor in tensors.items()]


def shares(tensors: Mapping[str, torch.Tensor], world_size: int, *, kind: str = "model") -> list[list[Piece]]:
    """Return each rank's contiguous share of every tensor, cut as by ZeRO; shares may be empty."""
    ranks: list[list[Piece]] = [[] for _ in range(world_size)]
    for name, tensor in tensors.items():
        cuts = [tensor.numel() * rank // world_size for rank in range(world_size + 1)]
        for rank, (start, end) in enumerate(pairwise(cuts)):
            if end > start or (tensor.numel() == 0 and rank == 0):
                piece = tensor.flatten()[start:end]
                ranks[rank].append(Piece(name, piece, kind, tuple(tensor.shape), start, "partitioned"))
    return ranks


class Run(catalog_helpers.Run):
    """One run of a history; `checkpoint` commits a step with the pieces of every rank."""

    def checkpoint(self, step: int, *ranks: Sequence[Piece], **metrics: float) -> None:
        for rank, pieces in zip(range(self.world_size), ranks, strict=True):
            self.part(step, rank, _stored(pieces))
        self.metrics(step, **metrics)
        assert self.writers[0].try_commit(step)
        self.register()

    def metrics(self, step: int, **metrics: float) -> None:
        for name, value in metrics.items():
            self.writers[0].journal.metric(step, name, value)
        self.writers[0].journal.flush()

    def tag(self, name: str, step: int) -> None:
        self.writers[0].journal.tag(name, step)
        self.writers[0].journal.flush()


def tiny_history(root: Path) -> Iterator[Run]:
    """Yield a run with three checkpoints of a model with four tensors; this is the body of a fixture."""
    run = Run(root)
    generator = torch.Generator().manual_seed(0)
    weights = {
        "layers.0.mlp.weight": torch.randn(4, 8, generator=generator),
        "layers.0.mlp.bias": torch.zeros(8),
        "layers.1.norm": torch.ones(8),
        "head.weight": torch.randn(8, 4, generator=generator).bfloat16(),
    }
    for step in (0, 10, 20):
        weights["layers.0.mlp.weight"] = weights["layers.0.mlp.weight"] + 0.01 * step
        weights["head.weight"] = weights["head.weight"] * (1 + step / 10)
        moments = {name: tensor.float() * 0.1 for name, tensor in weights.items()}
        pieces = [*whole(weights), *whole(moments, kind="exp_avg"), Piece("counters", _json(b'{"steps":1}'), "object")]
        run.checkpoint(step, pieces, loss=3.0 - step / 10, lr=1e-3, grad_norm=1.5, step_time_s=0.25)
        run.metrics(step + 1, loss=2.9 - step / 10)
    run.tag("good", 10)
    yield run
    run.close()


@contextmanager
def extended_shell(folder: Path) -> Iterator[InteractiveShell]:
    """Yield a fresh IPython shell with the extension loaded, whose files are in `folder`; it keeps no history."""
    with patch.dict(os.environ, IPYTHONDIR=str(folder)):
        shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
        shell.Completer.use_jedi = False  # Jedi would add completions of Python itself.
        shell.run_line_magic("load_ext", "dshistory")
        try:
            yield shell
        finally:
            InteractiveShell.clear_instance()


def _json(text: bytes) -> torch.Tensor:
    return torch.tensor(list(text), dtype=torch.uint8)


def _stored(pieces: Sequence[Piece]) -> list[catalog_helpers.Piece]:
    """Return the pieces as bytes, those with the widest elements first: so each is aligned to its elements."""
    return [
        catalog_helpers.Piece(
            piece.name,
            piece.tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes(),
            piece.kind,
            dtype_name(piece.tensor.dtype, what=piece.name),
            tuple(piece.tensor.shape) if piece.shape is None else piece.shape,
            piece.start,
            piece.placement,
            piece.aliases,
        )
        for piece in sorted(pieces, key=lambda piece: -piece.tensor.dtype.itemsize)
    ]


def history_of(root: Path, *checkpoints: list[list[Piece]], world_sizes: tuple[int, ...] = (1, 1)) -> Explorer:
    """Return an explorer of a history with one run for each checkpoint (steps 10, 20, ...), each run a child of the
    last.
    """
    parent = None
    for i, (ranks, world_size) in enumerate(zip(checkpoints, world_sizes, strict=True)):
        run = Run(root, f"run-{i}", world_size, parent, created=f"2026-11-21T10:15:0{i}+00:00")
        run.checkpoint(10 * (i + 1), *ranks)
        run.close()
        parent = (run.run, 10 * (i + 1))
    return Explorer.open(root)
