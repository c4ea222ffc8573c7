"""Runs ten thousand random lives of a history, with removals that are cut off anywhere, and prints what they held.

`make prove-retention`; SEQUENCES=100 runs fewer.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from retention_sequences import Sequences, counts

if __name__ == "__main__":
    wanted = int(os.environ.get("SEQUENCES", "10000"))
    run_state_machine_as_test(
        Sequences,
        settings=settings(
            max_examples=wanted,
            stateful_step_count=12,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for what, number in sorted(counts.items()):
        print(f"{number:>9,}  {what}")
    print(f"{counts['sequences']:,} sequences: nothing kept was lost, and every listed checkpoint restored bit for bit")
