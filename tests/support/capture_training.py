"""A complete PyTorch training as a script.

    python capture_training.py HISTORY OUT.pt [--steps N] [--every N] [--resume REF | --auto] [--epochs]

It writes the results of every step and the final state to OUT.pt. Two trainings with equal results computed the same.
"""

import argparse
import random

import numpy as np
import torch
from capture_helpers import Net, reference
from torchdata.stateful_dataloader import StatefulDataLoader

import capture


def build(args):
    model = Net(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if args.epochs:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    else:
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
        cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[5])
    data = [torch.full((32,), float(i)) for i in range(36)]
    return model, optimizer, scheduler, StatefulDataLoader(data, batch_size=4, shuffle=True)


def train(args, model, optimizer, scheduler, loader, session, state) -> dict[int, tuple]:
    """Train with noise from all three generators, dropout, a schedule and a user's counter; return the results of each
    step.
    """
    log = {}
    while state["step"] < args.steps:
        for batch in loader:
            noise = random.random() + np.random.rand() + torch.rand(())
            loss = model(batch / 36 + noise).square().mean()
            loss.backward()
            state["step"] += 1
            optimizer.step()
            optimizer.zero_grad()
            if not args.epochs:
                scheduler.step()
            session.log(loss=loss)
            log[state["step"]] = (float(loss.detach()), batch[:, 0].tolist(), optimizer.param_groups[0]["lr"])
            if state["step"] >= args.steps:
                break
        else:
            if args.epochs:
                scheduler.step()
    return log


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("history")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--resume")
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--epochs", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    np.random.seed(args.seed)
    model, optimizer, scheduler, loader = build(args)
    state = {"step": 0}
    user = capture.Stateful("user", state)
    parts = {"optimizer": optimizer, "scheduler": scheduler, "dataloader": loader, "providers": [user]}
    if args.resume:
        capture.restore(args.resume, history=args.history, model=model, **parts)
    session = capture.enable(
        model,
        every=args.every,
        history=args.history,
        budget_bytes=16 << 20,
        resume="auto" if args.auto else None,
        **parts,
    )
    log = train(args, model, optimizer, scheduler, loader, session, state)
    session.close()
    torch.save(
        {
            "log": log,
            "state": reference(model, optimizer),
            "scheduler": scheduler.state_dict(),
            "lr": [group["lr"] for group in optimizer.param_groups],
            "rng": [random.random(), np.random.rand(), float(torch.rand(()))],
            "run": session.run,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
