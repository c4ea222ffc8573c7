"""Cases for redo logs of DeepSpeed engines whose state something beside ordinary updates has made: loads, hooks of the
inner optimizer, edits before skipped updates, gradients that are no numbers. No fingerprint tells of it here."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_eager import Eager, state_of
from deepspeed_helpers import CPU_ADAM, FP16, OFFLOAD, allow_fp16, make_engine, train
from ranks import covers, guards
from torch.optim.optimizer import register_optimizer_step_pre_hook

import capture
from catalog.errors import MismatchError, NotFoundError

RANK = int(os.environ["RANK"])
OPTIONS: dict[str, Any] = {"every": 4, "redo": True, "stats_every": 0, "fingerprints": False}
OFFLOADED: dict[str, Any] = {"stage": 2, "zero": OFFLOAD, "optimizer": CPU_ADAM}


def recorded(
    engine: Any,
    history: Path,
    *,
    steps: int = 6,
    between: Callable[[int, Any], None] = lambda step, session: None,
) -> dict[int, Eager]:
    """Train so many more steps with a redo log and no fingerprints; return a copy of the state after each."""
    states = {}
    with capture.enable(engine, history=history, **OPTIONS) as session:
        between(engine.global_steps, session)
        for _ in range(steps):
            train(engine, 1)
            states[engine.global_steps] = state_of(engine)
            between(engine.global_steps, session)
    assert session.failures == []
    engine.destroy()
    torch.distributed.barrier()
    return states


def assert_made_again(history: Path, step: int, eager: Eager) -> None:
    made = capture.restore(step, history=history)
    for (kind, name), tensor in eager.tensors.items():
        if kind != "buffer" or RANK == 0:
            found = made[kind][name]
            same = torch.equal(tensor.reshape(-1).view(torch.uint8), found.reshape(-1).view(torch.uint8))
            assert same, f"step {step} of {history.name}: {kind} {name}"


@guards("A redo step has the bits of the training")
def case_hooks_of_the_inner_optimizer_that_write_are_named(folder: Path) -> None:
    """In two elements, which the sample of a fingerprint may not have."""

    def write(tensor: torch.Tensor) -> None:
        with torch.no_grad():
            tensor[:2].add_(0.5)

    def flat_of(optimizer: Any) -> torch.Tensor:
        flat: torch.Tensor = optimizer.param_groups[0]["params"][0]
        return flat

    def wrap(optimizer: Any) -> None:
        step = optimizer.step
        optimizer.step = lambda: (step(), write(optimizer.state[flat_of(optimizer)]["exp_avg_sq"]))

    def later(optimizer: Any) -> None:
        """A hook that is added when the update is under way comes behind the one that records."""
        hook = lambda inner, *_: write(flat_of(inner).grad)  # noqa: E731
        handle = register_optimizer_step_pre_hook(
            lambda *_: (optimizer.register_step_pre_hook(hook), handle.remove())[1]
        )

    ways: dict[str, tuple[Callable[[Any], Any], str]] = {
        "before": (
            lambda one: one.register_step_pre_hook(lambda o, *_: write(flat_of(o))),
            r"flat 0 was written within",
        ),
        "after": (
            lambda one: one.register_step_post_hook(lambda o, *_: write(o.state[flat_of(o)]["exp_avg"])),
            r"exp_avg of flat 0 was written within its update",
        ),
        "around": (wrap, r"exp_avg_sq of flat 0 was written within its update"),
        "later": (later, r"a hook of its optimizer was added while it was under way"),
    }
    for name, (install, message) in ways.items():
        engine = make_engine(stage=2)
        inner, history = engine.optimizer.optimizer, folder / f"hook-{name}"
        recorded(engine, history, steps=3, between=lambda step, _: install(inner) if step == 1 else None)  # noqa: B023
        assert capture.restore(1, history=history)
        with pytest.raises(MismatchError, match=message):
            capture.restore(2, history=history)


@guards("A redo step has the bits of the training")
def case_weights_edited_before_skipped_updates_stay(folder: Path) -> None:
    """Nothing derives them from their masters then, neither in the training nor where the steps are made again."""
    allow_fp16()

    def edit(step: int, session: Any) -> None:
        with torch.no_grad():
            if step == 0:
                with session.modify():
                    engine.module.gain.mul_(2.0)
            elif step == 2:
                engine.module.gain.mul_(2.0)

    engine = make_engine(stage=1, dtype="fp16", fp16={**FP16, "initial_scale_power": 40})
    history = folder / "skipped"
    states = recorded(engine, history, between=edit)
    assert engine.skipped_steps == 6
    assert torch.equal(states[1].tensors["model", "gain"], torch.full((3,), 2.0, dtype=torch.float16))
    assert_made_again(history, 1, states[1])
    with pytest.raises(MismatchError, match=r"after step 2 .*gain was written outside the update"):
        capture.restore(5, history=history)


@guards("A redo step has the bits of the training")
def case_weights_written_within_a_skipped_update_are_named(folder: Path) -> None:
    """By what somebody has put around the optimizer: an update that is applied derives them from their masters anew, a
    skipped one does not."""
    allow_fp16()
    engine = make_engine(stage=1, dtype="fp16", fp16={**FP16, "initial_scale_power": 40})
    history, step = folder / "written-within", engine.optimizer.step

    def writes(*args: Any, **options: Any) -> Any:
        made = step(*args, **options)
        if engine.global_steps == 2:
            with torch.no_grad():
                engine.module.gain.mul_(2.0)
        return made

    engine.optimizer.step = writes
    states = recorded(engine, history)
    assert engine.skipped_steps == 6
    assert torch.equal(states[3].tensors["model", "gain"], torch.full((3,), 2.0, dtype=torch.float16))
    assert_made_again(history, 2, states[2])
    with pytest.raises(MismatchError, match=r"after step 3 .*gain was written outside the update"):
        capture.restore(3, history=history)


@guards("A redo step has the bits of the training")
@covers("the redo log: gradients that are no numbers, ZeRO 1 and 2 in bf16")
def case_gradients_that_are_no_numbers(folder: Path) -> None:
    """The masters are rounded parameter by parameter, and were as flat tensors: a NaN has the same bits both ways."""
    unchecked = {"enabled": True, "check_grad_overflow": False}
    for stage, clipping in ((1, 0.0), (2, 0.5)):
        engine = make_engine(stage=stage, gradient_clipping=clipping, bf16=unchecked)

        def poison(step: int, _: Any, engine: Any = engine) -> None:
            if step == 1:
                engine.module.blocks[1].mlp[0].weight.register_hook(
                    lambda gradient: gradient.masked_fill(gradient > 0, float("nan"))
                )

        states = recorded(engine, folder / f"nan-{stage}", between=poison)
        assert states[2].tensors["model", "blocks.1.mlp.0.weight"].isnan().any()
        for step, eager in states.items():
            assert_made_again(folder / f"nan-{stage}", step, eager)


def saved_by_deepspeed(folder: Path, *, steps: int) -> str:
    engine = make_engine(**OFFLOADED)
    train(engine, steps)
    engine.save_checkpoint(str(folder / "saved"))
    engine.destroy()
    return str(folder / "saved")


@guards("A redo step has the bits of the training")
@covers("the redo log: DeepSpeed CPU Adam after DeepSpeed's own load, before and within a session")
def case_cpu_adam_after_a_load(folder: Path) -> None:
    """Its next update takes the power of its betas, where all before had a running product: after 20 updates these are
    other floats."""
    saved = saved_by_deepspeed(folder, steps=20)
    engine = make_engine(seed=8, **OFFLOADED)
    engine.load_checkpoint(saved)
    states = recorded(engine, folder / "loaded before", steps=5)
    for step, eager in states.items():
        assert_made_again(folder / "loaded before", step, eager)

    def load(step: int, _: Any) -> None:
        if step == 2:
            engine.load_checkpoint(saved)

    engine = make_engine(seed=8, **OFFLOADED)
    history = folder / "loaded within"
    states = recorded(engine, history, steps=9, between=load)
    for step in (1, 2, 25, 26):
        assert_made_again(history, step, states[step])
    with pytest.raises(NotFoundError, match="no record of step 3"):
        capture.restore(21, history=history)


@guards("A redo step has the bits of the training")
def case_a_load_that_counts_the_steps_back(folder: Path) -> None:
    """The checkpoints and records of the steps that are made twice are of two trainings."""
    saved = saved_by_deepspeed(folder, steps=1)

    def load(step: int, _: Any) -> None:
        if step == 2 and not loaded:
            loaded.append(step)
            engine.load_checkpoint(saved)

    loaded: list[int] = []
    engine = make_engine(seed=8, **OFFLOADED)
    history = folder / "back"
    states = recorded(engine, history, steps=8, between=load)
    assert list(states) == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(MismatchError, match=r"after step 3 .*the steps before it were counted twice"):
        capture.restore(3, history=history)
    assert_made_again(history, 5, states[5])


@guards("A redo step has the bits of the training")
def case_a_checkpoint_after_a_load_that_counts_back(folder: Path) -> None:
    """The log has its step, and the one after it, of the training before the load."""
    saved = saved_by_deepspeed(folder / "other", steps=1)

    def load_at(last: int) -> Callable[[int, Any], None]:
        loaded: list[int] = []

        def load(step: int, _: Any) -> None:
            if step == last and not loaded:
                loaded.append(step)
                engine.load_checkpoint(saved)

        return load

    engine = make_engine(seed=8, **OFFLOADED)
    history = folder / "back, and not beyond"
    states = recorded(engine, history, steps=4, between=load_at(3))
    assert list(states) == [1, 2, 3]
    assert_made_again(history, 1, states[1])
    assert_made_again(history, 2, states[2])
    with pytest.raises(MismatchError, match=r"the step was made twice, since a load has counted the steps back"):
        capture.restore(3, history=history)

    engine = make_engine(seed=8, **OFFLOADED)
    train(engine, 5)
    history = folder / "back at once"
    states = recorded(engine, history, steps=6, between=load_at(5))
    assert list(states) == [2, 3, 4, 5, 6, 7]
    assert_made_again(history, 4, states[4])
    assert_made_again(history, 7, states[7])
    with pytest.raises(MismatchError, match=r"after step 6 .*the steps before it were counted twice"):
        capture.restore(6, history=history)


@guards("A redo step has the bits of the training")
def case_cpu_adam_without_a_compiler_is_named(folder: Path) -> None:
    if RANK:
        return
    script = "import sys, capture; capture.restore(21, history=sys.argv[1])"
    hidden = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    hidden |= {"CXX": "/nowhere/c++", "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    command = [sys.executable, "-W", "ignore", "-c", script, str(folder / "loaded before")]
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "UnsupportedError: an update of DeepSpeedCPUAdam is made again by DeepSpeed's compiled code" in done.stderr
