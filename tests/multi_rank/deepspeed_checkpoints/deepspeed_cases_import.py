"""Cases for imports: checkpoints that DeepSpeed saved become a history that is searched, restored and exported."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_cases_export import MORE, SETTINGS, STEP, same_training
from deepspeed_eager import Eager, assert_same, state_of
from deepspeed_helpers import make_engine, train

import capture
import dshistory
from dshistory.explorer import Explorer

WORLD, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
WITHOUT_NAMES = ("0", "0-fp32")


def imported(folder: Path, name: str) -> Path:
    return folder / f"imported-{name}-{WORLD}"


def case_what_deepspeed_saved_is_what_the_history_has_and_goes_on_from(folder: Path) -> None:
    """ZeRO-3 is last in the loop: once a process has had such an engine, DeepSpeed computes `linear` differently."""
    for name in SETTINGS:
        middle, losses, last = saved_and_imported(folder, name)
        if name not in WITHOUT_NAMES:
            restored_goes_on_to_the_same_bits(folder, name, middle, losses, last)
            exported_again_is_the_same(folder, name, middle)


def saved_and_imported(folder: Path, name: str) -> tuple[Eager, list[float], Eager]:
    """Train and save twice; return the state at the second save, the losses afterwards and the final state."""
    saved = folder / f"saved-{name}-{WORLD}"
    engine = make_engine(**SETTINGS[name])
    states = {}
    for _ in range(2):
        train(engine, STEP)
        states[engine.global_steps] = state_of(engine)
        engine.save_checkpoint(str(saved))
    torch.manual_seed(31 + RANK)
    losses = train(engine, MORE)
    last = state_of(engine)
    engine.destroy()
    if RANK == 0:
        table = dshistory.import_checkpoint(saved, history=imported(folder, name))
        assert [row["step"] for row in table] == [STEP, 2 * STEP]
        explorer = Explorer.open(imported(folder, name))
        assert not len(explorer.verify(quiet=True))
        for step, state in states.items():
            compare(explorer.restore(step), state, name)
        moved = [row["name"] for row in explorer.diff(STEP, 2 * STEP) if row["status"] == "changed"]
        assert len(moved) > 20
        assert "place" not in moved
    dist.barrier()
    return states[2 * STEP], losses, last


def compare(stored: dict[str, Any], state: Eager, name: str) -> None:
    compared = set()
    for (kind, key), tensor in state.tensors.items():
        if name in WITHOUT_NAMES and kind not in ("model", "buffer"):
            continue  # Without ZeRO, DeepSpeed's files do not say which parameter an optimizer's state belongs to.
        assert torch.equal(stored[kind][key], tensor), (name, kind, key)
        compared.add((kind, key))
    assert torch.equal(stored["model"]["head.weight"], stored["model"]["embed.weight"])
    assert {(kind, key) for kind, named in stored.items() for key in named} - compared == {("model", "head.weight")}


def restored_goes_on_to_the_same_bits(folder: Path, name: str, middle: Eager, losses: list[float], last: Eager) -> None:
    engine = make_engine(seed=99, **SETTINGS[name])
    capture.restore(2 * STEP, history=imported(folder, name), engine=engine)
    same_training(state_of(engine), middle)
    torch.manual_seed(31 + RANK)
    assert train(engine, MORE, start=2 * STEP) == losses, name
    same_training(state_of(engine), last)
    engine.destroy()


def exported_again_is_the_same(folder: Path, name: str, middle: Eager) -> None:
    out = folder / f"again-{name}-{WORLD}"
    if RANK == 0:
        Explorer.open(imported(folder, name)).export(2 * STEP, out, format="deepspeed", world_size=WORLD)
        history = folder / f"twice-{name}-{WORLD}"
        dshistory.import_checkpoint(out, history=history)
        once, twice = (Explorer.open(one).restore(2 * STEP) for one in (imported(folder, name), history))
        flat = [{(kind, key): t for kind, named in one.items() for key, t in named.items()} for one in (once, twice)]
        assert_same(Eager(flat[0], {}), Eager(flat[1], {}))
    dist.barrier()
    engine = make_engine(seed=98, **SETTINGS[name])
    engine.load_checkpoint(str(out))
    same_training(state_of(engine), middle)
    engine.destroy()
