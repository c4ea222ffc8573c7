"""Train the small GPT under DeepSpeed with every N-th step captured, started by torchrun or examples/demo.py.

    torchrun --nproc-per-node 2 examples/gpt/train.py --history ./history
    torchrun --nproc-per-node 2 examples/gpt/train.py --history ./history --restore 60

The second command restores step 60 and trains on from there, bit for bit like the first.
"""

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from data import TextLoader, standard_library
from deepspeed.accelerator import get_accelerator
from model import GPT, GPTConfig, processor_multiplies_bf16

import capture


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=Path, required=True, help="folder of the history")
    parser.add_argument("--steps", type=int, default=120, help="train until this step")
    parser.add_argument("--every", type=int, default=10, help="capture every N-th step")
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3), help="ZeRO stage")
    parser.add_argument("--batch", type=int, default=8, help="sequences for each rank and step")
    parser.add_argument("--restore", type=int, help="continue from this step of the history")
    return parser.parse_args()


def deepspeed_config(stage: int, batch: int) -> dict[str, Any]:
    multiplies_bf16 = get_accelerator().device_name() != "cpu" or processor_multiplies_bf16()
    return {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": multiplies_bf16},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "wall_clock_breakdown": False,
    }


def warmup_then_cosine(step: int, *, warmup: int = 10, horizon: int = 200) -> float:
    """Return a factor of the learning rate that depends on the step alone, so that a resumed training has the same."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (horizon - warmup))))


def main() -> None:
    args = arguments()
    deepspeed.init_distributed(verbose=False)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = torch.device(get_accelerator().device_name(int(os.environ.get("LOCAL_RANK", "0"))))
    torch.manual_seed(0)
    config = GPTConfig()
    model = GPT(config)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine),
        config=deepspeed_config(args.stage, args.batch),
    )
    loader = TextLoader(
        standard_library(), context=config.context, batch=args.batch, rank=rank, world_size=world_size, seed=7
    )
    if args.restore is not None:
        capture.restore(args.restore, history=args.history, engine=engine, dataloader=loader)
    tokens = args.batch * world_size * config.context
    with capture.enable(engine, every=args.every, history=args.history, dataloader=loader) as session:
        started, first = time.perf_counter(), engine.global_steps
        train(engine, loader, device, steps=args.steps, tokens_per_step=tokens, rank=rank)
        elapsed = time.perf_counter() - started
        session.snapshot()
        session.wait()
        report(session, steps=engine.global_steps - first, elapsed_s=elapsed, rank=rank)
    # Gloo's threads release the tensors of a collective only after it has returned, and abort the process if the
    # interpreter has ended by then. A barrier has no tensors and gives the threads the time.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train(
    engine: Any, loader: TextLoader, device: torch.device, *, steps: int, tokens_per_step: int, rank: int
) -> None:
    started, first = time.perf_counter(), engine.global_steps
    for tokens, targets in loader:
        loss = engine(tokens.to(device), targets.to(device))
        engine.backward(loss)
        engine.step()
        step = engine.global_steps
        if rank == 0 and (step % 10 == 0 or step == steps):
            rate = (step - first) * tokens_per_step / (time.perf_counter() - started)
            print(f"  step {step:4d}/{steps}   loss {loss.item():.4f} (rank 0)   {rate:7,.0f} tokens/s", flush=True)
        if step >= steps:
            return


def report(session: capture.Session, *, steps: int, elapsed_s: float, rank: int) -> None:
    """Print what was captured on all ranks, and its cost on the slowest rank."""
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, session.stats)
    if rank:
        return
    captured, written = ranks[0].snapshots, sum(stats.bytes for stats in ranks)
    stalled = max(stats.stall_s for stats in ranks)
    rate = sum(stats.bytes_per_s for stats in ranks)
    print(
        f"  captured {captured} checkpoints of run {session.run}:"
        f" {written / 1e6:,.0f} MB, written at {rate / 1e6:,.0f} MB/s"
    )
    print(
        f"  stall {1000 * stalled / steps:.2f} ms a step, {100 * stalled / elapsed_s:.2f} % of {elapsed_s:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
