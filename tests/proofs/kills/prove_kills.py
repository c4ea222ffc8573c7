"""`make prove-kills`: SIGKILL two ranks before each of their calls to the file system, and at random times."""

import random
import sys
import time

from kills import Kill, killer

RANDOM_KILLS = 150
MOST_SHOWN = 20
PROGRESS_EVERY = 20


def main() -> int:
    begun = time.monotonic()
    wrong: list[str] = []
    with killer() as rounds:
        started = time.monotonic()
        problems, calls = rounds.round(Kill())
        whole = time.monotonic() - started
        wrong += problems
        plan = [Kill(rank=rank, call=call) for rank in (0, 1) for call in range(1, calls[rank] + 1)]
        draw = random.Random(4)
        draw.shuffle(plan)
        plan += [Kill(rank=draw.randrange(2), seconds=draw.random() * whole) for _ in range(RANDOM_KILLS)]
        for number, kill in enumerate(plan):
            problems, _ = rounds.round(kill)
            wrong += problems
            for problem in problems[:MOST_SHOWN]:
                print(f"{kill}: {problem}", flush=True)
            if number % PROGRESS_EVERY == PROGRESS_EVERY - 1:
                print(f"{number + 1} of {len(plan)} rounds, {time.monotonic() - begun:.0f} s", flush=True)
        last = rounds.finish()
        print("\n".join(last[:MOST_SHOWN]))
        wrong += last
        print(
            f"{len(plan) + 1} trainings of two ranks: {len(plan) - RANDOM_KILLS} killed before a call, {RANDOM_KILLS} "
            f"at random times; {rounds.kills} processes killed, {rounds.committed} checkpoints committed, {len(wrong)} "
            f"problems; {time.monotonic() - begun:.0f} s"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
