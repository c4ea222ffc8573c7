"""`make prove-crashes`: open every state that a power cut may leave of three recorded trainings.

`python prove_crashes.py N` opens one state in N, and `python prove_crashes.py 1 "two ranks"` those of one recording.
"""

import itertools
import sys
import time

from crash_checks import Checker, record, states

RECORDINGS = {
    "one rank after a killed run": {"ranks": 1, "killed_before": True, "steps": 1},
    "one rank": {"ranks": 1},
    "two ranks": {"ranks": 2},
}
TRAININGS_EVERY = 1000
"""A training resumes from one state in so many; from each other one, a run of the catalog alone goes on."""

MOST_SHOWN = 20


PROGRESS_EVERY = 5000


def main(every: int, names: list[str]) -> int:
    failures = 0
    for name in names or RECORDINGS:
        begun = time.monotonic()
        recording = record(**RECORDINGS[name])
        wrong = 0
        with Checker(recording) as checker:
            for number, state in enumerate(itertools.islice(states(recording), 0, None, every)):
                if number % PROGRESS_EVERY == PROGRESS_EVERY - 1:
                    print(f"{name}: {number + 1} states, {time.monotonic() - begun:.0f} s", flush=True)
                for problem in checker.check(state, next_training=number % TRAININGS_EVERY == 0):
                    wrong += 1
                    if wrong <= MOST_SHOWN:
                        last = recording.calls[state.calls - 1] if state.calls else "no call"
                        print(f"{name}: after {state.calls} calls ({last}), {state.left()}: {problem}", flush=True)
        seconds = time.monotonic() - begun
        counts = ", ".join(f"{count} {what}" for what, count in sorted(checker.counts.items()))
        print(f"{name}: {len(recording.calls)} calls; {counts}; {wrong} problems; {seconds:.0f} s", flush=True)
        failures += wrong
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, sys.argv[2:]))
