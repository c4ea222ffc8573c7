"""The control plane between ranks: over torch.distributed, on the main thread only, at `enable` and `restore`.

Nothing here runs while training goes on, so a dead rank can never hang a snapshot. There are three exceptions, where
all ranks are in the training thread together. At a step that is due, ranks decide with `any` whether it is left out,
under `on_full="skip"` or a budget of bytes. There, and before the first update, they share the room of a byte budget
among their redo logs, with `gather` and `broadcast`. And with `capture.checkpoint_engine(engine, wait=True)` they agree
at the end of a save that its files are on the disk.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from catalog.disk.locks import is_locked
from catalog.errors import SetupError
from catalog.format.lock_file import lock_owner

__all__ = ["Ranks", "processes_here"]

_Result = TypeVar("_Result")


def processes_here(world_size: int) -> int:
    """Return how many ranks of a training share this host: what its launcher says, else all of them."""
    with contextlib.suppress(KeyError, ValueError):
        return max(1, min(world_size, int(os.environ["LOCAL_WORLD_SIZE"])))
    return world_size


class Ranks:
    """This process among `world_size`; alone, every call is local."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, which must be JSON, on every rank."""
        if self.world_size == 1:
            return value
        return self._gather(json.dumps(value) if self.rank == 0 else "")[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, each JSON, on every rank."""
        return [value] if self.world_size == 1 else self._gather(json.dumps(value))

    def agree(self, what: str, action: Callable[[], _Result]) -> _Result:
        """Run `action` on every rank and return its result. When it raises on any, raise on all: its own error where it
        failed, a SetupError elsewhere, so that no rank waits in a collective for one that has given up. `what` names
        the action in the error.
        """
        failure: Exception | None = None
        result: _Result | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - raised again below, on every rank
            failure = error
        if self.world_size > 1:
            messages = self._gather(json.dumps(None if failure is None else f"{type(failure).__name__}: {failure}"))
            others = {rank: message for rank, message in enumerate(messages) if message is not None}
            if failure is None and others:
                rank, message = min(others.items())
                raise SetupError(f"{what} failed on rank {rank}: {message}")
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank. One all_reduce of one number: all ranks must call it at the same
        point of their training.
        """
        if self.world_size == 1:
            return flag
        shared = torch.tensor([int(flag)], dtype=torch.int32, device=_device())
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return bool(shared.item())

    def prove_shared(self, folder: Path) -> None:
        """Raise SetupError, on every rank, unless all ranks see the same `folder`: rank 0 writes a nonce there and all
        must read it.
        """
        if self.world_size == 1:
            return
        nonce = self.broadcast(secrets.token_hex(16))
        path = folder / f".nonce-{nonce}"
        self.agree(f"writing into {folder}", lambda: path.touch() if self.rank == 0 else None)
        try:
            self.agree(f"seeing {folder}", lambda: self._require(path))
        finally:
            if self.rank == 0:
                # Whatever ails it, the other ranks are about to enter the next collective.
                with contextlib.suppress(OSError):
                    path.unlink()

    def see_locks(self, lock: Callable[[int], Path]) -> bool | None:
        """Return whether ranks on different hosts see each other's locks, or None when all are on one host.

        `lock` gives the path of a rank's lock file; every rank must hold its own. Each rank looks at one lock of every
        other host.
        """
        if self.world_size == 1:
            return None
        owner = lock_owner()
        hosts = [tuple(host) for host in self._gather(json.dumps([owner.host, owner.boot]))]
        if len(set(hosts)) == 1:
            return None
        peers = [hosts.index(host) for host in set(hosts) if host != hosts[self.rank]]
        seen = self.agree("looking at each other's locks", lambda: all(self._is_locked(lock(peer)) for peer in peers))
        return all(self._gather(json.dumps(seen)))

    def _is_locked(self, path: Path) -> bool:
        # A listing makes network file systems look again instead of answering from their cache.
        return path.name in os.listdir(path.parent) and is_locked(path)

    def _require(self, path: Path) -> None:
        # A listing makes network file systems look again instead of answering from their cache.
        if not path.parent.is_dir() or path.name not in os.listdir(path.parent):
            raise SetupError(
                f"rank {self.rank} does not see what rank 0 wrote in {path.parent}: the folder must be on a file "
                "system that all ranks share"
            )

    def _gather(self, text: str) -> list[Any]:
        """Return every rank's JSON text, decoded. Lengths are exchanged first, because a gather takes equal sizes."""
        device = _device()
        data = text.encode()
        length = torch.tensor([len(data)], dtype=torch.int64, device=device)
        lengths = [torch.zeros_like(length) for _ in range(self.world_size)]
        dist.all_gather(lengths, length)
        size = max(1, *(int(other) for other in lengths))
        padded = torch.zeros(size, dtype=torch.uint8, device=device)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        buffers = [torch.zeros_like(padded) for _ in range(self.world_size)]
        dist.all_gather(buffers, padded)
        texts = [bytes(buffer[: int(other)].cpu().numpy()) for buffer, other in zip(buffers, lengths, strict=True)]
        return [json.loads(raw) if raw else None for raw in texts]


def _device() -> torch.device:
    """Return the device whose tensors the process group can send."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
