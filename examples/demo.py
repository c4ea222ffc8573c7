"""The complete demo: train with a history, look at it, go back to a step, and verify that nothing was lost.

python examples/demo.py            # what `make demo` runs; about three minutes on two cores
python examples/demo.py --steps 20 --every 5
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import children
import notebook
import torch

import dshistory

HERE = Path(__file__).resolve().parent
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="length of the training")
    parser.add_argument("--every", type=int, default=10, help="capture every N-th step")
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3), help="ZeRO stage")
    parser.add_argument("--output", type=Path, default=HERE.parent / "demo-output", help="folder for all output")
    args = parser.parse_args()
    history = args.output / "history"
    if (history / "history.json").exists():
        shutil.rmtree(history)  # from the previous demo
    args.output.mkdir(parents=True, exist_ok=True)
    middle = args.steps // 2 // args.every * args.every
    started = time.perf_counter()

    heading(f"1. Train a small GPT on {RANKS} ranks, ZeRO stage {args.stage}, every {args.every}th step captured")
    common = [
        "--history",
        str(history),
        "--steps",
        str(args.steps),
        "--every",
        str(args.every),
        "--stage",
        str(args.stage),
    ]
    train(common)

    heading("2. Open the history")
    explorer = dshistory.open(history)
    original = explorer.history.current_run()
    print(explorer.log())
    print(f"\nWhat changed from step {middle} to step {args.steps}, the largest changes first:\n")
    print(short(explorer.diff(middle, args.steps, quiet=True).top(10)))

    heading(f"3. Go back to step {middle} in new processes and train on from there")
    train([*common, "--restore", str(middle)])
    compare(explorer, original, explorer.history.current_run(), start=middle, end=args.steps)

    heading("4. Run the notebook on this history")
    executed, page = notebook.execute(
        HERE.parent / "notebooks" / "quickstart.ipynb", history=history, output=args.output
    )
    print(f"  notebook  {shown(executed)}\n  as HTML   {shown(page)}\n  history   {shown(history)}")
    program = shown(Path(sys.executable).with_name("dshistory"))
    print(f"\nDone in {time.perf_counter() - started:.0f} s. Look around:  {program} log {shown(history)}")


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def train(arguments: list[str]) -> None:
    """Run examples/gpt/train.py on two ranks: on GPUs if there are enough, otherwise with gloo on the CPU."""
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // RANKS)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment["PYTHONWARNINGS"] = "ignore::FutureWarning:torch.distributed.c10d_logger"
    if torch.cuda.device_count() < RANKS:
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(RANKS),
        "--local-addr",
        "127.0.0.1",
    ]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    children.run([*launcher, *rendezvous, str(HERE / "gpt" / "train.py"), *arguments], environment)


def compare(explorer: dshistory.Explorer, original: str, continued: str, *, start: int, end: int) -> None:
    """Compare the losses of every step and all tensors of the last one bit for bit; exit if they differ."""
    query = "SELECT step, value FROM metrics WHERE run = $run AND name = 'loss' AND step > $start ORDER BY step"
    before, after = (explorer.sql(query, run=run, start=start).to_arrow() for run in (original, continued))
    same_losses = before.num_rows == end - start and before.equals(after)
    changes = explorer.diff(f"{original}:{end}", f"{continued}:{end}", kinds="*", quiet=True)
    different = [f"{row['kind']} {row['name']}" for row in changes if row["status"] != "same"]
    print(f"  losses of steps {start + 1} to {end}: {'bit-identical' if same_losses else 'DIFFERENT'}")
    print(f"  {len(changes)} tensors at step {end} (weights, master weights, Adam moments): ", end="")
    print("bit-identical" if not different else f"{len(different)} DIFFERENT, as {different[0]}")
    if different or not same_losses:
        sys.exit("the continued training is not the original one")


def short(changes: dshistory.Table) -> dshistory.Table:
    """Return the columns that fit a terminal."""
    columns = ["name", "shape", "relative_update", "update_norm", "cosine", "changed_share"]
    return dshistory.Table(changes.to_arrow().select(columns), formats=changes.formats)


def shown(path: Path) -> str:
    """Return the path relative to the working directory if that is shorter."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
