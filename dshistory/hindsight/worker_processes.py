"""Measures checkpoints in several processes, each with a model of its own.

The processes are spawned, so the function and the model are pickled once for each. The model travels without its
values: its tensors have only shapes on the way. Parameters come from the checkpoints; buffers, of which a checkpoint
may not have all, are sent by value. No memory is shared. Ctrl-C is heard by this process alone, which ends the others.
"""

import copy
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch

from catalog.errors import SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.hindsight.measuring import Attempts, Failure, Measured
from dshistory.tensors.borrowed_model import BorrowedModel

__all__ = ["measured_by_workers"]


@dataclass(frozen=True)
class _Work:
    """A worker needs the model without values, the devices of its tensors, and the bytes of its buffers."""

    root: Path
    fn: Callable[[Any], Any]
    model: torch.nn.Module
    devices: tuple[str, ...]
    buffers: tuple[np.ndarray, ...]
    weights: str
    threads: int


def measured_by_workers(
    root: Path,
    fn: Callable[[Any], Any],
    refs: Sequence[CheckpointRef],
    *,
    model: torch.nn.Module,
    weights: str,
    workers: int,
) -> Generator[tuple[CheckpointRef, Measured | Failure]]:
    """Yield what the function gives for each checkpoint, in the order in which they are done.

    SetupError when the function or the model can't be pickled. A worker that dies fails the checkpoint that it was at;
    SetupError when there is none left for the others.
    """
    count = min(workers, len(refs))
    if not count:
        return
    work = _work(root, fn, model, weights, threads=max(1, (os.cpu_count() or 1) // count))
    waiting = iter(refs)
    busy: dict[Any, CheckpointRef] = {}
    with ExitStack() as stack:
        processes: dict[Any, SpawnProcess] = {}
        for ref in [next(waiting) for _ in range(count)]:
            connection, process = _started(work, stack)
            processes[connection] = process
            connection.send(ref)
            busy[connection] = ref
        while busy:
            ready: Any
            for ready in wait(list(busy)):
                done, following = busy.pop(ready), None
                outcome = _received(ready, processes[ready])
                if not isinstance(outcome, _Died):
                    following = next(waiting, None)
                if following is not None:
                    ready.send(following)
                    busy[ready] = following
                yield done, outcome.failure if isinstance(outcome, _Died) else outcome
        left = list(waiting)
        if left:
            raise SetupError(
                f"evaluate: every worker process has ended; {len(left)} checkpoints are left: call it again"
            )


@dataclass(frozen=True)
class _Died:
    failure: Failure


def _received(connection: Any, process: SpawnProcess) -> Measured | Failure | _Died:
    try:
        outcome: Measured | Failure = connection.recv()
    except (EOFError, OSError):
        process.join()
        return _Died(
            Failure(
                f"its worker process ended with exit code {process.exitcode}: what it wrote stands above; fn and the "
                "class of the model must be in a module that can be imported, which a notebook or an unguarded script "
                "is not"
            )
        )
    return outcome


def _started(work: _Work, stack: ExitStack) -> tuple["Connection[Any, Any]", SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    stack.callback(ours.close)
    process = context.Process(target=_serve, args=(theirs, work))
    process.start()
    stack.callback(process.join)
    stack.callback(process.terminate)
    theirs.close()
    return ours, process


def _work(root: Path, fn: Callable[[Any], Any], model: torch.nn.Module, weights: str, *, threads: int) -> _Work:
    if not isinstance(model, torch.nn.Module):
        raise SetupError(f"evaluate: model={model!r}: give the torch module that takes the weights")
    tensors = _tensors(model)
    shell = _copied(model, [torch.empty_like(tensor, device="meta") for tensor in tensors])
    for what, value in (("fn", fn), ("model", shell)):
        try:
            ForkingPickler.dumps(value)
        except Exception as error:
            raise SetupError(
                f"evaluate: {what} can't be sent to worker processes ({type(error).__name__}: {error}): define it at "
                "the top of a module, with no lambda and no open file inside, or leave workers=1"
            ) from error
    buffers = tuple(_bytes_of(buffer) for buffer in _buffers(model))
    devices = tuple(str(tensor.device) for tensor in tensors)
    return _Work(root, fn, shell, devices, buffers, weights, threads)


def _serve(connection: "Connection[Any, Any]", work: _Work) -> None:
    """Measure the checkpoints that come, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(work.threads)
    made = [
        torch.empty_like(tensor, device=device)
        for tensor, device in zip(_tensors(work.model), work.devices, strict=True)
    ]
    model = _copied(work.model, made)
    for buffer, content in zip(_buffers(model), work.buffers, strict=True):
        buffer.copy_(torch.from_numpy(content).view(buffer.dtype).view(buffer.shape))
    history = History.open(work.root)
    with (
        BorrowedModel(model, verb="evaluate") as borrowed,
        closing(Attempts(history, work.fn, borrowed, weights=work.weights)) as attempts,
    ):
        while True:
            try:
                ref = connection.recv()
            except EOFError:
                return
            outcome = attempts.attempt(ref)
            # The error itself may hold anything, which other processes can't be sent.
            connection.send(Failure(outcome.message) if isinstance(outcome, Failure) else outcome)


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return list(chain(model.parameters(), model.buffers()))


def _buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    return list(model.buffers())


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    return flat.numpy().copy()


def _copied(model: torch.nn.Module, values: Sequence[torch.Tensor]) -> torch.nn.Module:
    """Return a copy of the model that has these tensors in place of its own; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for tensor, value in zip(_tensors(model), values, strict=True):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    return copy.deepcopy(model, memo)
