"""Runs ten thousand random lives of a history, with removals and compactions that are cut off anywhere, and prints what
they held.

`make prove-retention`; SEQUENCES=100 runs fewer, and SEED=5 runs others: one seed always gives the same lives. Ctrl-C
ends it with the sum of the lives so far.
"""

import os
import sys
import time

from hypothesis import HealthCheck, seed, settings
from hypothesis.errors import HypothesisException
from hypothesis.stateful import run_state_machine_as_test
from retention_sequences import Sequences, counts

EVERY_S = 60.0
"""How often it says how far it is."""


class Told(Sequences):
    """A life that says now and then how many there were."""

    begun = said = time.monotonic()
    ended = 0
    failed = 0

    def teardown(self) -> None:
        super().teardown()
        error = sys.exception()
        if isinstance(error, Exception) and not isinstance(error, HypothesisException):
            Told.failed += 1
        elif not isinstance(error, KeyboardInterrupt):
            Told.ended += 1
        if time.monotonic() - Told.said > EVERY_S:
            Told.said = time.monotonic()
            print(f"{Told.ended:,} sequences held, {Told.failed} failed; {Told.said - Told.begun:.0f} s", flush=True)


def main() -> int:
    whole = True
    number = int(os.environ.get("SEED", "0"))
    print(f"SEED={number}", flush=True)
    try:
        run_state_machine_as_test(
            seed(number)(Told),
            settings=settings(
                max_examples=int(os.environ.get("SEQUENCES", "10000")),
                stateful_step_count=12,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except KeyboardInterrupt:
        print("interrupted")
        whole = False
    for what, number in sorted(counts.items()):
        print(f"{number:>9,}  {what}")
    if Told.failed:
        print(f"{Told.ended:,} sequences held; one failed, and was being made simpler")
        return 1
    print(f"{Told.ended:,} sequences: nothing kept was lost, and every listed checkpoint restored bit for bit")
    return 0 if whole else 130


if __name__ == "__main__":
    sys.exit(main())
