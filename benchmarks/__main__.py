"""Run the benchmarks and write their tables: python -m benchmarks [NAME ...] [--smoke]."""

import argparse
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

from benchmarks import (
    compaction,
    diagnose,
    grid,
    imports,
    machine,
    packing,
    queries,
    redo,
    report,
    restore,
    save,
    scaling,
    statistics,
    tensors,
    training,
)

FULL = {
    "save": {"state_bytes": 1_100_000_000, "times": 5, "window_s": 1.0},
    "restore": {"state_bytes": 1_100_000_000, "times": 5},
    "grid": {"total_bytes": 256 << 20, "pieces": (64 << 10, 8 << 20), "times": 3},
    "tensors": {"total_bytes": 640 << 20, "counts": (10, 100, 1_000, 10_000), "times": 5},
    "scaling": {"sizes": (64_000_000, 256_000_000, 1_024_000_000), "ranks": (1, 2), "tensors": 100, "times": 5},
    "statistics": {"total_bytes": 256 << 20, "times": 5},
    "queries": {
        "sizes": ((100, 1_000), (1_000, 1_000), (100, 100), (1_000, 100), (10_000, 100)),
        "times": 15,
        "pause_s": 1.0,
    },
    "training": {"state_bytes": 1_000_000_000, "times": 7, "batch": 4},
    "redo": {"state_bytes": 280_000_000, "times": 7, "steps": 8, "batch": 8},
    "packing": {"layers": 2, "width": 192, "steps": 300, "times": 3},
    "compaction": {"state_bytes": 150_000_000, "times": 9, "steps": 16, "every": 2, "batch": 4},
    "imports": {"checkpoints": 20, "times": 15},
    "diagnose": {"every": (1, 5, 10)},
}
SMOKE = {
    "save": {"state_bytes": 1, "times": 1, "window_s": 0.0},
    "restore": {"state_bytes": 1, "times": 1},
    "grid": {"total_bytes": 16 << 20, "pieces": (64 << 10, 8 << 20), "times": 1},
    "tensors": {"total_bytes": 8 << 20, "counts": (10, 100), "times": 1},
    "scaling": {"sizes": (1_000_000, 4_000_000), "ranks": (1, 2), "tensors": 10, "times": 1},
    "statistics": {"total_bytes": 1 << 20, "times": 1},
    "queries": {"sizes": ((4, 12), (24, 12)), "times": 1, "pause_s": 0.0},
    "training": {"state_bytes": 1, "times": 1, "batch": 1},
    "redo": {"state_bytes": 1, "times": 1, "steps": 3, "batch": 1},
    "packing": {"layers": 1, "width": 64, "steps": 1, "times": 1},
    "compaction": {"state_bytes": 1, "times": 1, "steps": 4, "every": 1, "batch": 1},
    "imports": {"checkpoints": 2, "times": 1},
    "diagnose": {"every": (10,), "causes": ("nothing", "learning rate"), "optimizers": ("AdamW",)},
}
SUITES = {
    "save": save,
    "restore": restore,
    "grid": grid,
    "tensors": tensors,
    "scaling": scaling,
    "statistics": statistics,
    "queries": queries,
    "training": training,
    "redo": redo,
    "packing": packing,
    "compaction": compaction,
    "imports": imports,
    "diagnose": diagnose,
}


def main() -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=list(SUITES), help=f"some of {', '.join(SUITES)}; default: all")
    parser.add_argument("--smoke", action="store_true", help="use tiny sizes, only to check that everything runs")
    parser.add_argument(
        "--scratch", type=Path, default=Path("benchmarks/scratch"), help="folder on the disk to measure"
    )
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder for the tables")
    args = parser.parse_args()
    if unknown := set(args.suites) - set(SUITES):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; choose from {', '.join(SUITES)}")
    for name in args.suites:
        measure(name, args.scratch, args.results, (SMOKE if args.smoke else FULL)[name])


def measure(name: str, scratch: Path, results: Path, settings: Mapping[str, object]) -> None:
    """Run one suite in an empty scratch folder; write its tables into `results` and print them."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    suite = SUITES[name]
    facts = machine.facts(scratch)
    print(f"benchmark {name}: {dict(settings)}", flush=True)
    rows, used = suite.run(scratch, **settings)
    text = report.markdown(
        f"Benchmark: {name}", suite.__doc__.strip(), rows, suite.COLUMNS, facts, skipped=used.get("skipped", {})
    )
    report.write(name, results, text, rows, used, facts)
    shutil.rmtree(scratch)
    print(text, flush=True)


if __name__ == "__main__":
    main()
