"""Create the histories that the notebooks use, and run each notebook on its own history.

python examples/notebooks.py                # all of them; what `make notebooks` runs
python examples/notebooks.py loss_jumped
"""

import argparse
import shutil
import sys
from pathlib import Path

import children
import notebook

HERE = Path(__file__).resolve().parent
TRAININGS = {
    "loss_jumped": ["--spike 83"],
    "comparing_runs": ["--learning-rate 1e-3", "--learning-rate 3e-3"],
    "sql_cookbook": ["--steps 60 --freeze blocks.0."],
}
"""The runs of the history of each notebook, as options of examples/gpt/plain.py."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all, {', '.join(TRAININGS)}")
    parser.add_argument("--output", type=Path, default=HERE.parent / "demo-output", help="folder for all output")
    args = parser.parse_args()
    if unknown := set(args.names) - TRAININGS.keys():
        parser.error(f"unknown notebook {', '.join(sorted(unknown))}; choose from {', '.join(TRAININGS)}")
    for name in args.names or TRAININGS:
        make(name, args.output)


def make(name: str, output: Path) -> None:
    """Create the history again and execute the notebook on it; save it as a notebook and as HTML."""
    history = output / "histories" / name
    if (history / "history.json").exists():
        shutil.rmtree(history)  # from the previous run
    history.parent.mkdir(parents=True, exist_ok=True)
    print(f"{name}: train", flush=True)
    for options in TRAININGS[name]:
        children.run([sys.executable, str(HERE / "gpt" / "plain.py"), "--history", str(history), *options.split()], {})
    print(f"{name}: run the notebook", flush=True)
    executed, page = notebook.execute(HERE.parent / "notebooks" / f"{name}.ipynb", history=history, output=output)
    print(f"  {executed}\n  {page}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
