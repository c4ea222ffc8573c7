"""Cases for replays and crossovers on two ranks, each of which has its own batches: all ranks come to one answer."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from frameworks_helpers import batch, enabled, rank, tiny, train, with_optimizer
from torch.nn.parallel import DistributedDataParallel

from dshistory import Explorer


def every_rank_says(value: Any) -> list[Any]:
    said: list[Any] = [None, None]
    dist.all_gather_object(said, value)
    return said


class Live:
    """A training in the meaning of `replay`; `losses` are those of this rank, by batch."""

    def __init__(self, seed: int) -> None:
        module = DistributedDataParallel(tiny(seed), broadcast_buffers=False)
        self.model, self.optimizer, self.scheduler = with_optimizer(module)
        self.losses: list[float] = []

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "dataloader": lambda step: batch(step - 1),
            "train_step": self.step,
            "quiet": True,
        }

    def step(self, tokens: torch.Tensor) -> float:
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return self.losses[-1]

    def mean(self, place: int) -> float:
        mine, other = every_rank_says(self.losses[place])
        assert mine != other, "each rank has its own batches"
        return (mine + other) / 2


def history(folder: Path) -> Explorer:
    if not (folder / "history").exists():
        live = Live(1)
        with enabled((live.model, live.optimizer, live.scheduler), folder / "history", every=3) as session:
            train((live.model, live.optimizer, live.scheduler), 9, start=0)
            session.wait()
        dist.barrier()
    return Explorer.open(folder / "history")


def case_a_replay_is_compared_by_the_losses_of_all_ranks(folder: Path) -> None:
    live = Live(2)
    table = history(folder).replay(3, **live.parts())
    assert table.parted is None, table.note
    assert table["loss"].to_pylist() == [live.mean(place) for place in range(6)]
    assert set(table["difference"].to_pylist()) == {0.0}
    rows, others = every_rank_says((list(table), table.note))
    assert rows == others


def case_a_crossover_judges_by_the_mean_loss_of_all_ranks(folder: Path) -> None:
    live = Live(3)
    table = history(folder).crossover(3, 6, batches=[4], sets=3, probes=2, **live.parts())
    assert table[0]["highest_loss"] == live.mean(0)
    assert table[0]["loss_after"] == (live.mean(1) + live.mean(2)) / 2
    mine, other = every_rank_says((list(table), table.verdict, table.note))
    assert mine == other


def case_ranks_replay_the_same_steps_at_random(folder: Path) -> None:
    table = history(folder).replay_check(1, **Live(4).parts())
    assert table["identical"].to_pylist() == [True]
    mine, other = every_rank_says(list(table))
    assert mine == other


def case_a_bisection_goes_by_one_answer(folder: Path) -> None:
    asked: list[float] = []

    def gone(replayed: Any) -> bool:
        asked.append(replayed[-1]["loss"])
        return rank() == 0

    table = history(folder).bisect_replay(3, 6, predicate=gone, **Live(5).parts())
    assert table["gone"].to_pylist() == [True], "rank 0 says so after the first replay, and rank 1 makes no other one"
    mine, other = every_rank_says((asked, table.note, list(table)))
    assert mine == other
