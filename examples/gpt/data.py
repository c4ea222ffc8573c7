"""Text that exists on every machine: the source of Python's standard library, one token per byte."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch


def standard_library(limit_bytes: int = 8 << 20) -> np.ndarray:
    """Return the first `limit_bytes` of the library's modules, in order of their path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(
        p for folder in (".", "json", "email", "asyncio", "unittest") for p in (root / folder).glob("*.py")
    ):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return np.frombuffer(bytes(text[:limit_bytes]), dtype=np.uint8)


class TextLoader:
    """Endless batches in an order that depends on the seed alone.

    The position is two numbers, so it can be restored. Every rank takes its own share of each global batch.
    `state_dict` describes the batch that comes next.
    """

    def __init__(
        self, text: np.ndarray, *, context: int, batch: int, rank: int = 0, world_size: int = 1, seed: int = 0
    ) -> None:
        self.text, self.context, self.batch, self.seed = text, context, batch, seed
        self.rank, self.world_size = rank, world_size
        self.pieces = (len(text) - 1) // context
        self.batches = self.pieces // (batch * world_size)
        self.epoch = 0
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        shuffled = None
        while True:
            if self.position >= self.batches:
                self.epoch, self.position = self.epoch + 1, 0
            if shuffled != self.epoch:  # also true after load_state_dict in the middle of an epoch
                shuffled = self.epoch
                order = np.random.default_rng((self.seed, self.epoch)).permutation(self.pieces)
            start = (self.position * self.world_size + self.rank) * self.batch
            rows = [self._piece(int(index)) for index in order[start : start + self.batch]]
            self.position += 1
            yield torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])

    def _piece(self, index: int) -> torch.Tensor:
        start = index * self.context
        return torch.from_numpy(self.text[start : start + self.context + 1].astype(np.int64))
