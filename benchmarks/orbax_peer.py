"""Orbax's asynchronous checkpoints, in a separate Python that `make bench-orbax` creates. This program needs no torch.

The first line of input is JSON with the shapes of the state, which the program then holds as fp32 JAX arrays. Each
further line, {"folder": ..., "window_s": ...}, asks for one turn and is answered with a line of figures, measured as in
`save`.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.measure import PeakMemory, clock, forget, make_durable, resident_bytes

State = dict[str, jax.Array]


def changed(state: State) -> State:
    """Return new arrays, as every update of a JAX training creates them."""
    return jax.block_until_ready({name: value + 1 for name, value in state.items()})


def turn(saver: ocp.AsyncCheckpointer, state: State, folder: Path, window_s: float) -> tuple[State, dict[str, float]]:
    state = changed(state)
    folder.mkdir()
    make_durable(folder)
    memory = PeakMemory()
    memory.start()
    with clock() as durable:
        saver.save(folder / "state", args=ocp.args.StandardSave(state))
        saver.wait_until_finished()
        make_durable(folder)
    extra = memory.extra_bytes()
    forget(folder)
    with clock() as load:
        restored = jax.block_until_ready(saver.restore(folder / "state", args=ocp.args.StandardRestore(state)))
    del restored
    with clock() as call:
        saver.save(folder / "again", args=ocp.args.StandardSave(state))
    time.sleep(max(0.0, window_s - call.seconds))
    state = changed(state)
    saver.wait_until_finished()
    shutil.rmtree(folder)
    figures = {"blocked": call.seconds, "durable": durable.seconds, "cold read": load.seconds, "extra memory": extra}
    return state, figures


def main() -> None:
    shapes = json.loads(sys.stdin.readline())["shapes"]
    generator = np.random.default_rng(0)
    state = {
        name: jax.numpy.asarray(generator.standard_normal(shape, dtype=np.float32)) for name, shape in shapes.items()
    }
    saver = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    before = resident_bytes()
    kept = None
    for line in sys.stdin:
        order = json.loads(line)
        state, figures = turn(saver, state, Path(order["folder"]).resolve(), order["window_s"])
        kept = max(0, resident_bytes() - before) if kept is None else kept
        figures["extra memory"] += kept
        print(json.dumps(figures), flush=True)
    saver.close()


if __name__ == "__main__":
    main()
