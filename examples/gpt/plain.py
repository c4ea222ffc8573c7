"""Train a tiny GPT in plain PyTorch with every N-th step captured, as for the histories of the notebooks.

    python examples/gpt/plain.py --history ./history --learning-rate 3e-3
    python examples/gpt/plain.py --history ./history --spike 83
    python examples/gpt/plain.py --history ./history --freeze blocks.0.

The second command plants a fault: at step 83 the learning rate is 1 instead of 0.001. The third one freezes a block.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from data import TextLoader, standard_library
from model import GPT, GPTConfig

import capture

CONFIG = GPTConfig(context=64, layers=2, heads=4, width=64)
SPIKE = 1000.0

Training = tuple[GPT, torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR, TextLoader]


def schedule(spike: int | None) -> Callable[[int], float]:
    """Return the factor of the learning rate by the number of earlier updates.

    It rises to 1 in ten steps of warm-up, and is `SPIKE` for the update with number `spike`.
    """
    return lambda before: SPIKE if before + 1 == spike else min(1.0, (before + 1) / 10)


def training(
    *, learning_rate: float = 1e-3, seed: int = 0, spike: int | None = None, freeze: str | None = None
) -> Training:
    """Return a new model, optimizer, scheduler and loader, which are equal for equal arguments."""
    torch.set_num_threads(1)  # fast enough here, and bit-identical on any number of cores
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(freeze is None or not name.startswith(freeze))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=learning_rate, weight_decay=0.01
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(spike))
    loader = TextLoader(standard_library(2 << 20), context=CONFIG.context, batch=16, seed=seed)
    return model, optimizer, scheduler, loader


def train(
    session: capture.Session,
    model: GPT,
    optimizer: torch.optim.AdamW,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    loader: TextLoader,
    *,
    steps: int,
) -> None:
    """Train for `steps` more steps in a plain loop."""
    for _, (tokens, targets) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        scheduler.step()
        session.log(loss=loss, grad_norm=norm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=Path, required=True, help="folder of the history")
    parser.add_argument("--steps", type=int, default=120, help="length of the training")
    parser.add_argument("--every", type=int, default=5, help="capture every N-th step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spike", type=int, help="plant a fault: at this step the learning rate is far too high")
    parser.add_argument("--freeze", help="freeze the tensors whose names begin with this")
    args = parser.parse_args()
    model, optimizer, scheduler, loader = training(
        learning_rate=args.learning_rate, seed=args.seed, spike=args.spike, freeze=args.freeze
    )
    taking = {"optimizer": optimizer, "scheduler": scheduler, "dataloader": loader}
    with capture.enable(model, **taking, every=args.every, history=args.history) as session:
        train(session, model, optimizer, scheduler, loader, steps=args.steps)
    print(f"  run {session.run}: {args.steps} steps, {session.stats.snapshots} of them captured")


if __name__ == "__main__":
    main()
