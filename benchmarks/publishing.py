"""The publishing process: python -m benchmarks.publishing ROOT CHECKPOINTS TENSORS PAUSE_S.

It starts to publish at the first line of its input, and stops at the second.
"""

import json
import sys
import threading
import time
from pathlib import Path

from benchmarks.made_up import MadeUp

REGISTER_EVERY = 16


def main(root: Path, checkpoints: int, tensors: int, pause_s: float) -> None:
    history = MadeUp(root, tensors=tensors)
    for number in range(1, checkpoints + 1):
        history.publish(register=number % REGISTER_EVERY == 0)
    history.register()
    print("made", flush=True)
    sys.stdin.readline()
    history.publish()
    print("publishing", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
    took = []
    while not (took and ended.is_set()):
        begun = time.perf_counter()
        history.publish()
        took.append(time.perf_counter() - begun)
        ended.wait(max(0.0, pause_s - took[-1]))
    history.close()
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
