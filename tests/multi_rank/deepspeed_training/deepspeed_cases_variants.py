"""Cases for less common engines: fp16 with skipped updates, DeepSpeed's CPU Adam, ZeRO-Offload, accumulation that the
caller controls.
"""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed_cases_state import check_resume
from deepspeed_cases_usual import check_capture
from deepspeed_eager import assert_same, providers, put_back, take
from deepspeed_helpers import CPU_ADAM, FP16, OFFLOAD, allow_fp16, batches, make_engine, train, with_client
from deepspeed_recorder import Recorder
from ranks import covers

import capture
import dshistory
from capture.loops.deepspeed.loop import DeepSpeedLoop
from catalog.errors import UnsupportedError


@covers("fp16 with a dynamic loss scale: ZeRO 0, 1, 2, 3 (DeepSpeed's check of the CPU overridden)")
def case_fp16_with_a_dynamic_loss_scale(folder: Path) -> None:
    allow_fp16()
    for stage in (0, 1, 2, 3):
        check_resume(stage=stage, dtype="fp16", fp16=FP16)


@covers("fp16, updates skipped on overflow: ZeRO 2")
def case_fp16_skips_updates_and_says_so(folder: Path) -> None:
    allow_fp16()
    engine = make_engine(stage=2, dtype="fp16", fp16=FP16)
    loop = DeepSpeedLoop(engine)
    seen = Recorder(loop)
    loop.attach(seen)
    losses = train(engine, 6)
    applied = [applied for applied, _ in seen.steps]
    assert applied[0] is False
    assert applied.count(False) == engine.skipped_steps < 6
    assert seen.said == ["update", "step"] * 6
    metrics = [metrics for _, metrics in seen.steps]
    assert metrics[0]["loss_scale"] == 2.0**15, "the scale that follows from the skipped update"
    assert [float(m["loss"]) for m in metrics] == losses, "as the user passed it, not scaled"
    engine.destroy()


@covers("ZeRO-Offload of the optimizer with DeepSpeed CPU Adam: ZeRO 1, 2, 3; of the parameters: ZeRO 3")
def case_offload_of_the_optimizer(folder: Path) -> None:
    """Train five updates, after which the running product of betas inside DeepSpeedCPUAdam differs from their power."""
    for settings in (
        {"stage": 1, "zero": OFFLOAD},
        {"stage": 2, "zero": OFFLOAD, "accumulation": 2},
        {"stage": 3, "zero": OFFLOAD, "accumulation": 2},
        {"stage": 3, "zero": {**OFFLOAD, "offload_param": {"device": "cpu"}}},
    ):
        engine = make_engine(optimizer=CPU_ADAM, **settings)
        torch.manual_seed(3 + int(os.environ["RANK"]))
        state = providers(engine)
        train(engine, 5)
        at_5 = take(state)
        losses = train(engine, 20)
        at_25 = take(state)
        engine.destroy()
        fresh = make_engine(optimizer=CPU_ADAM, seed=99, **settings)
        for _ in range(2):
            put_back(providers(fresh), at_5)
            assert train(fresh, 20) == losses, settings
            assert_same(take(providers(fresh)), at_25)
        fresh.destroy()


def once(inner: Any, plant: Callable[[Any], None]) -> None:
    """Run `plant` right before the next update of the optimizer that DeepSpeed wraps."""

    def before(*_: Any) -> None:
        hook.remove()
        plant(inner)

    hook = inner.register_step_pre_hook(before)


def audited(
    folder: Path, *, plant: Callable[[Any], None] | None = None, steps: int = 6, **settings: Any
) -> list[dict[str, str]]:
    """Train some steps, with `plant` before the last but two; return {name: cause} of each update but the first. A step
    whose update was skipped has none."""
    engine = make_engine(**settings)
    with capture.enable(engine, every=1, history=folder, stats_every=0) as session:
        for step in range(1, steps + 1):
            if plant is not None and step == steps - 2:
                # A hook of the optimizer runs between the barrier and the update.
                once(engine.optimizer.optimizer, plant)
            train(engine, 1)
    assert session.stats.failed == 0
    engine.destroy()
    torch.distributed.barrier()
    explorer = dshistory.open(folder)
    captured = explorer.sql("SELECT step FROM checkpoints WHERE step > 0 ORDER BY step")["step"].to_pylist()
    tables = [explorer.audit(before, after, quiet=True) for before, after in pairwise(captured)]
    checked = [row["learning_rate"] for row in tables[-1] if row["updates"]]
    assert checked
    assert None not in checked, "not one of them is left out"
    return [{row["name"]: row["cause"] for row in table.unbalanced} for table in tables]


def rate_times_four(inner: Any) -> None:
    # ZeRO 1 and 2 call the optimizer once for each group, with that group alone.
    group, kept = inner.param_groups[0], inner.param_groups[0]["lr"]
    group["lr"] = 4 * kept

    def after(*_: Any) -> None:
        group["lr"] = kept
        handle.remove()

    handle = inner.register_step_post_hook(after)


def swapped_moments(inner: Any) -> None:
    for state in inner.state.values():
        first, second = state["exp_avg"], state["exp_avg_sq"]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept.abs())


def edited_weight(inner: Any) -> None:
    inner.param_groups[0]["params"][0].data[:3] += 0.5


SETTINGS: dict[str, dict[str, Any]] = {
    "torch's": {"stage": 2},
    "offloaded-1": {"stage": 1, "zero": OFFLOAD, "optimizer": CPU_ADAM},
    "offloaded-2": {"stage": 2, "zero": OFFLOAD, "optimizer": CPU_ADAM, "accumulation": 2},
    "offloaded-3": {"stage": 3, "zero": OFFLOAD, "optimizer": CPU_ADAM},
    "L2": {
        "stage": 2,
        "zero": OFFLOAD,
        "optimizer": {"type": "Adam", "params": {**CPU_ADAM["params"], "adam_w_mode": False}},
    },
    "short memory": {"stage": 2, "zero": OFFLOAD, "optimizer": {**CPU_ADAM, "params": {"betas": [0.8, 0.99]}}},
}


@covers("the audit of DeepSpeed CPU Adam: ZeRO 1, 2, 3, decoupled decay and L2")
def case_books_of_an_offloaded_optimizer_balance(folder: Path) -> None:
    for name, settings in SETTINGS.items():
        assert audited(folder / name, **settings) == [{}] * 5, name


@covers("the audit of DeepSpeed CPU Adam: a learning rate, moments and weights that were changed are named")
def case_books_of_an_offloaded_optimizer_name_what_was_done(folder: Path) -> None:
    for stage in (1, 2):
        settings = SETTINGS[f"offloaded-{stage}"]
        found = audited(folder / f"rate-{stage}", plant=rate_times_four, **settings)
        assert [len(causes) > 0 for causes in found] == [False, False, True, False, False]
        assert all("learning rate of the update x4" in cause for cause in found[2].values()), found
        found = audited(folder / f"moments-{stage}", plant=swapped_moments, **settings)
        assert [len(causes) > 0 for causes in found] == [False, False, True, False, False]
        assert all("second moment" in cause for cause in found[2].values()), found
        found = audited(folder / f"edit-{stage}", plant=edited_weight, **settings)
        assert [len(causes) for causes in found] == [0, 0, 2, 0, 0], "the first of the partition of each rank"
        assert all("changed beside the update" in cause for cause in found[2].values()), found


@covers("the audit under fp16 with a dynamic loss scale and skipped updates: ZeRO 0, 1, 2, 3, CPU Adam")
def case_books_under_fp16_balance(folder: Path) -> None:
    allow_fp16()
    scaled = {"dtype": "fp16", "fp16": FP16}
    for stage in (0, 1, 2, 3):
        balanced = audited(folder / f"{stage}", stage=stage, steps=12, **scaled)
        assert not any(balanced), stage
        if stage == 2:
            assert 1 < len(balanced) < 11, "the first was skipped, and later ones were not"
        assert len(balanced) > 1
    offloaded = {**scaled, **SETTINGS["offloaded-2"]}
    assert not any(audited(folder / "offloaded", steps=12, **offloaded))
    found = audited(folder / "rate", plant=rate_times_four, steps=12, **offloaded)
    assert sum(len(causes) > 0 for causes in found) == 1


@covers("offloaded and plain Adam read each other's checkpoints")
def case_offloaded_and_plain_adam_read_each_other(folder: Path) -> None:
    makers: list[dict[str, Any]] = [{"stage": 2}, {"stage": 3, "zero": OFFLOAD, "optimizer": CPU_ADAM}]
    for source, target in (makers, makers[::-1]):
        engine = make_engine(**source)
        train(engine, 3)
        eager = take(DeepSpeedLoop(engine).providers())
        engine.destroy()
        other = make_engine(seed=50, **target)
        put_back(DeepSpeedLoop(other).providers(), eager)
        mine = take(DeepSpeedLoop(other).providers())
        assert_same(mine, eager)
        assert [float(step) for step in mine.objects["optimizer"]["state"]["step"]] == [3.0, 3.0]
        train(other, 1)
        other.destroy()


@covers("`managed_gradient_accumulation: false`: ZeRO 1, 2, 3")
def case_accumulation_owned_by_the_caller(folder: Path) -> None:
    for stage in (1, 2, 3):
        engine = make_engine(stage=stage, accumulation=2, managed_gradient_accumulation=False)
        loop = DeepSpeedLoop(engine)
        seen = Recorder(loop, copies=True)
        detach = loop.attach(seen)
        state = providers(engine)

        def steps(number: int, *, engine: Any = engine) -> list[float]:
            losses = []
            for _ in range(number):
                stream = batches(int(os.environ["RANK"]), start=3 * engine.global_steps)
                for _ in range(3):
                    loss = engine(next(stream))
                    engine.backward(loss)
                    losses.append(loss.item())
                engine.step()
            return losses

        steps(2)
        assert seen.said == ["update", "step"] * 2
        assert_same(seen.copies[1], seen.copies[2])
        detach()
        at_2 = take(state)
        losses = steps(2)
        put_back(state, at_2)
        engine.backward(engine(next(batches(7))))
        put_back(state, at_2)
        assert steps(2) == losses
        assert engine.global_samples == 2 * int(os.environ["WORLD_SIZE"]) * 3 * 4
        engine.destroy()


@covers("DeepSpeed CPU Adam without offload: ZeRO 1, 2")
def case_cpu_adam_without_offload(folder: Path) -> None:
    for stage in (1, 2):
        check_capture(folder / f"cpu-{stage}", lambda seed, s=stage: with_client(DeepSpeedCPUAdam, seed, stage=s))


def case_partial_offload_for_real(folder: Path) -> None:
    partial = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    adam = {"type": "AdamW", "params": {"lr": 5e-3}}
    engine = make_engine(stage=3, zero=partial, optimizer=adam)
    with pytest.raises(UnsupportedError, match="partial optimizer offload"):
        capture.enable(engine, history=folder / "partial")
    engine.destroy()
