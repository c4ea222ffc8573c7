"""Cases in new processes: they restore what `deepspeed_cases_original` captured and train on to the same bits."""

import math
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed_cases_original import FULL, LAST, RESTORED, history_of, note
from deepspeed_cases_resharded import check_equal
from deepspeed_eager import Eager, assert_same, state_of
from deepspeed_helpers import make_engine, train
from ranks import covers, guards

import capture


@guards("Resume is exact")
@covers("restored by new processes: ZeRO 0, 1, 2, 3")
def case_resume_bit_for_bit(folder: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    for name, settings in FULL.items():
        losses, *saved = torch.load(note(folder, name), weights_only=False)
        middle, last = Eager(*saved[:2]), Eager(*saved[2:])
        engine = make_engine(seed=99, **settings)
        capture.restore(RESTORED, history=history_of(folder, name, world=world), engine=engine)
        assert_same(state_of(engine), middle)
        assert train(engine, LAST - RESTORED) == losses, name
        again = state_of(engine)
        assert_same(again, last)
        for one in ("counters", "lr_scheduler", "loss_scaler"):
            assert again.objects[one] == last.objects[one]
        assert torch.equal(again.objects["rng"]["torch"], last.objects["rng"]["torch"])
        assert again.objects["rng"]["python"] == last.objects["rng"]["python"]
        engine.destroy()


@guards("Resume is exact")
@covers("replayed bit for bit by new processes: ZeRO 3")
def case_replay_is_bit_identical(folder: Path) -> None:
    import dshistory

    world = int(os.environ["WORLD_SIZE"])
    name = "stage-3"
    h = dshistory.Explorer.open(history_of(folder, name, world=world))
    captured = [step for step in h.history.steps(h.history.current_run()) if step > RESTORED]
    engine = make_engine(seed=99, **FULL[name])
    again = h.replay(
        RESTORED, engine=engine, train_step=lambda _: train(engine, 1)[0], dataloader=lambda step: step, quiet=True
    )
    assert again.parted is None, again.note
    assert again.identical_until == captured[-1]
    changed = h.replay(
        RESTORED,
        engine=engine,
        train_step=lambda _: train(engine, 1)[0],
        dataloader=lambda step: step,
        change={"lr_scale": 0.5},
        quiet=True,
    )
    assert changed.parted is not None, changed.note
    rates = h.sql(
        "SELECT a.value / b.value AS ratio FROM metrics a JOIN metrics b USING (step, name) "
        "WHERE name = 'lr' AND a.run = $changed AND b.run = $again AND step > $begin AND b.value > 0",
        changed=changed.run,
        again=again.run,
        begin=RESTORED,
    )["ratio"].to_pylist()
    assert all(math.isclose(rate, 0.5) for rate in rates), rates
    engine.destroy()


@guards("Resume is exact")
def case_resume_auto_goes_on(folder: Path) -> None:
    """A child run continues from the newest checkpoint, and the live engine goes back to an earlier one."""
    from catalog.history import History

    world = int(os.environ["WORLD_SIZE"])
    # No earlier stage works here: once a process has had a ZeRO-3 engine, DeepSpeed computes `linear` differently for
    # all engines.
    name = "stage-3"
    history = history_of(folder, name, world=world)
    losses, *saved = torch.load(note(folder, name), weights_only=False)
    engine = make_engine(seed=99, **FULL[name])
    with capture.enable(engine, every=50, history=history, resume="auto") as session:
        assert engine.global_steps == LAST
        assert_same(state_of(engine), Eager(*saved[2:]))
        train(engine, 2)
    opened = History.open(history)
    facts = next(run for run in opened.runs() if run.run == session.run)
    assert facts.parent_step == LAST
    capture.restore(RESTORED, history=history, engine=engine)
    assert_same(state_of(engine), Eager(*saved[:2]))
    again = train(engine, LAST - RESTORED)
    assert again == losses, (name, [i for i, pair in enumerate(zip(again, losses, strict=True)) if pair[0] != pair[1]])
    engine.destroy()


@guards("Resume is exact")
def case_another_world_size_and_stage(folder: Path) -> None:
    """Restore a checkpoint of the other world size into an engine of another stage."""
    here = int(os.environ["WORLD_SIZE"])
    other = 3 - here
    for name, settings in FULL.items():
        history = history_of(folder, name, world=other)
        stored: Any = capture.restore(RESTORED, history=history)
        alike = [one for one in FULL.values() if one.get("dtype") == settings.get("dtype")]
        target = alike[alike.index(settings) - 1]
        engine = make_engine(seed=50, **{**target, "accumulation": settings.get("accumulation", 1)})
        capture.restore(RESTORED, history=history, engine=engine)
        mine = state_of(engine)
        flat = {(kind, name): tensor for kind, named in stored.items() for name, tensor in named.items()}
        unaliased = {key: tensor for key, tensor in flat.items() if key[1] != "head.weight"}
        check_equal(mine, Eager(unaliased, objects_at(folder, name, other)))
        assert all(map(math.isfinite, train(engine, 1)))
        assert engine.global_steps == RESTORED + 1
        engine.destroy()


def objects_at(folder: Path, name: str, world: int) -> dict[str, Any]:
    objects: dict[str, Any] = torch.load(folder / f"{name}-{world}-0.pt", weights_only=False)[2]
    return objects
