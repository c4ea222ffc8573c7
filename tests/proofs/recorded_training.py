"""The training that is recorded and killed: `python recorded_training.py HISTORY STEPS`, alone or as one rank of two.

Each captures every step with the POSIX backend, which makes the same files as io_uring with calls that can be seen. A
layer is frozen, so that later checkpoints refer to files of earlier ones. Whatever `wait` has said is durable is noted
between the recorded calls.
"""

import datetime
import os
import sys
from pathlib import Path

import torch
from file_calls import kill_before, note

import capture

__all__ = ["BUDGET_BYTES", "train"]

BUDGET_BYTES = 8 << 20


def train(root: Path, steps: int) -> None:
    """Train as the rank that the environment names, and note each step that is committed for good."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[0].requires_grad_(False)
    trained: torch.nn.Module = model
    if world > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{os.environ['MEETING']}",
            rank=int(os.environ["RANK"]),
            world_size=world,
            timeout=datetime.timedelta(seconds=60),
        )
        trained = torch.nn.parallel.DistributedDataParallel(model)
    if "KILL_BEFORE" in os.environ:
        kill_before(int(os.environ["KILL_BEFORE"]))
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=0.01)
    session = capture.enable(
        trained, optimizer=optimizer, every=1, history=root, resume="auto", backend="posix", budget_bytes=BUDGET_BYTES
    )
    for _ in range(steps):
        loss = trained(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
        step = session.snapshot()
        session.wait()
        note(f"committed {session.run}:{step}")
    session.tag("end", step)
    session.close()
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
