"""A captured training of a small GPT that continues on request.

Each line on stdin is a number of steps. The answer is the number of the last step, once it is committed.

python browser_training.py HISTORY [--spike STEP]
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import capture
from examples.gpt.data import TextLoader, standard_library
from examples.gpt.model import GPT, GPTConfig

EVERY = 4
LEARNING_RATE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("history")
    parser.add_argument("--spike", type=int, help="the step whose learning rate is 100 times that of the others")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = GPTConfig(context=32, layers=4, heads=2, width=64)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loader = TextLoader(standard_library(400_000), context=config.context, batch=4)
    batches = iter(loader)
    step = 0
    training = {"optimizer": optimizer, "dataloader": loader}
    with capture.enable(model, **training, every=EVERY, stats_every=EVERY, history=args.history) as session:
        for line in sys.stdin:
            for _ in range(int(line)):
                step += 1
                for group in optimizer.param_groups:
                    group["lr"] = LEARNING_RATE * (100 if step == args.spike else 1)
                tokens, targets = next(batches)
                optimizer.zero_grad()
                loss = model(tokens, targets)
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
            session.wait()
            print(step, flush=True)


if __name__ == "__main__":
    main()
