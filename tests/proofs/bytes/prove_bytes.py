"""`make prove-bytes`: flip every byte of a small history and random bytes of a larger one; `verify` must name each."""

import random
import shutil
import sys
import time
from pathlib import Path

from byte_flips import Flips, published, small_history
from folders import fast_folder
from small_training import train

LARGE_WIDTH = 1024
RANDOM_FLIPS = 1000
MOST_SHOWN = 20


def main() -> int:
    folder = fast_folder()
    try:
        missed = every_byte_of_a_small_one(folder) + random_bytes_of_a_large_one(folder)
    finally:
        shutil.rmtree(folder)
    print("\n".join(missed[:MOST_SHOWN]))
    return 1 if missed else 0


def every_byte_of_a_small_one(folder: Path) -> list[str]:
    begun = time.monotonic()
    flips = Flips(small_history(folder / "small"))
    for path in published(flips.root):
        flips.every_byte(path)
        print(f"{path.relative_to(flips.root)}: {path.stat().st_size} bytes", flush=True)
    _report("every byte of a small history", flips, begun)
    return flips.missed


def random_bytes_of_a_large_one(folder: Path) -> list[str]:
    begun = time.monotonic()
    train(folder / "large", width=LARGE_WIDTH, steps=1)
    flips = Flips(folder / "large")
    files = published(flips.root)
    draw = random.Random(11)
    sizes = [path.stat().st_size for path in files]
    for path in draw.choices(files, weights=sizes, k=RANDOM_FLIPS):
        flips.flip(path, [draw.randrange(path.stat().st_size)])
    _report(f"random bytes of {sum(sizes) >> 20} MiB", flips, begun)
    return flips.missed


def _report(what: str, flips: Flips, begun: float) -> None:
    kinds = ", ".join(f"{count} in {kind}" for kind, count in sorted(flips.counts.items()))
    total = sum(flips.counts.values())
    seconds = time.monotonic() - begun
    print(f"{what}: {total} found ({kinds}), {len(flips.missed)} missed; {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
