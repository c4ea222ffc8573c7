"""Cases in which ranks hold different parameters, captured for real: pipeline stages with a tied layer, and experts."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_eager import assert_same, state_of
from deepspeed_helpers import train
from deepspeed_recorder import Recorder
from deepspeed_splits import make_experts, make_pipeline, train_pipeline
from ranks import covers

import capture
from capture.loops.deepspeed.loop import DeepSpeedLoop
from catalog.errors import UnsupportedError
from catalog.history import History

# Experts are first: a pipeline leaves its grid behind in DeepSpeed's globals, and experts would be placed on it.


@covers("MoE with expert parallelism, `ep_size` 1 and 2: ZeRO 0, 1, 2")
def case_experts_resume_bit_for_bit(folder: Path) -> None:
    for ep_size in (2, 1):
        for stage in (0, 1, 2):
            history = folder / f"experts-{ep_size}-{stage}"
            engine = make_experts(ep_size=ep_size, stage=stage)
            torch.manual_seed(3 + int(os.environ["RANK"]))
            with capture.enable(engine, every=4, history=history):
                train(engine, 4)
                middle = state_of(engine)
                losses = train(engine, 4)
                last = state_of(engine)
            experts = [
                name
                for kind, name in middle.tensors
                if kind == "master" and name.endswith("weight") and "_experts." in name
            ]
            assert len(experts) == 4, experts
            assert len({float(middle.tensors[("master", name)].sum()) for name in experts}) == 4
            engine.destroy()
            torch.distributed.barrier()

            again = make_experts(ep_size=ep_size, stage=stage, seed=9)
            capture.restore(4, history=history, engine=again)
            assert_same(state_of(again), middle)
            assert train(again, 4) == losses
            assert_same(state_of(again), last)
            again.destroy()


@covers("MoE into another `ep_size` and ZeRO stage")
def case_experts_move_between_ranks(folder: Path) -> None:
    stored = capture.restore(4, history=folder / "experts-2-2")
    assert isinstance(stored, dict)
    engine = make_experts(ep_size=1, stage=1, seed=9)
    capture.restore(4, history=folder / "experts-2-2", engine=engine)
    mine = state_of(engine)
    for kind in ("master", "exp_avg"):
        for name, tensor in stored[kind].items():
            if name != "head.weight":
                assert torch.equal(mine.tensors[(kind, name)], tensor), (kind, name)
    train(engine, 1)
    engine.destroy()


@covers("`PipelineModule` of 2 stages with a tied layer: ZeRO 0, 1, bf16 and fp32")
def case_pipeline_resumes_bit_for_bit(folder: Path) -> None:
    variants: list[dict[str, Any]] = [{"stage": 0}, {"stage": 1}, {"stage": 1, "dtype": "fp32"}]
    for number, settings in enumerate(variants):
        history = folder / f"pipeline-{number}"
        engine = make_pipeline(stages=2, **settings)
        with capture.enable(engine, every=4, history=history):
            first = train_pipeline(engine, 4)
            middle = state_of(engine)
            losses = train_pipeline(engine, 4)
            last = state_of(engine)
        torch.distributed.barrier()
        stored = capture.restore(4, history=history)
        assert isinstance(stored, dict)
        for (kind, name), tensor in middle.without_buffers().tensors.items():
            assert torch.equal(stored[kind][name], tensor), (kind, name)
        rows = History.open(history).query("SELECT value FROM metrics WHERE name = 'loss' ORDER BY step").to_pylist()
        assert [row["value"] for row in rows] == pytest.approx([*first, *losses])
        engine.destroy()

        again = make_pipeline(stages=2, seed=9, **settings)
        capture.restore(4, history=history, engine=again)
        assert_same(state_of(again), middle)
        assert train_pipeline(again, 4) == losses
        assert_same(state_of(again), last)
        again.destroy()


def assert_holds(engine: Any, stored: dict[str, dict[str, torch.Tensor]]) -> None:
    """Assert that the engine has the weights and moments that are stored, and no others."""
    mine = state_of(engine)
    for kind in ("model", "master", "exp_avg", "exp_avg_sq"):
        assert {name for k, name in mine.tensors if k == kind} == stored[kind].keys()
        for name, tensor in stored[kind].items():
            assert torch.equal(mine.tensors[(kind, name)], tensor), (kind, name)


@covers("a pipeline of 2 stages into one of 1 stage")
def case_pipeline_of_two_stages_becomes_one(folder: Path) -> None:
    stored = capture.restore(4, history=folder / "pipeline-1")
    assert isinstance(stored, dict)
    engine = make_pipeline(stages=1, seed=9, stage=1)
    capture.restore(4, history=folder / "pipeline-1", engine=engine)
    assert_holds(engine, stored)
    train_pipeline(engine, 1)
    engine.destroy()


@covers("a pipeline of 1 stage into one of 2 stages")
def case_pipeline_of_one_stage_becomes_two(folder: Path) -> None:
    history = folder / "pipeline-of-one"
    engine = make_pipeline(stages=1, stage=1)
    with capture.enable(engine, every=2, history=history):
        train_pipeline(engine, 2)
    engine.destroy()
    torch.distributed.barrier()
    stored = capture.restore(2, history=history)
    assert isinstance(stored, dict)
    engine = make_pipeline(stages=2, seed=9, stage=1)
    capture.restore(2, history=history, engine=engine)
    assert_holds(engine, stored)
    assert all(map(math.isfinite, train_pipeline(engine, 1)))
    engine.destroy()


def case_pipeline_hooks(folder: Path) -> None:
    engine = make_pipeline(stages=2, stage=1)
    loop = DeepSpeedLoop(engine)
    seen = Recorder(loop, copies=True)
    detach = loop.attach(seen)
    train_pipeline(engine, 3)
    assert seen.said == ["update", "step"] * 3
    for after, before in zip(seen.copies[1::2], seen.copies[2::2], strict=False):
        assert_same(after, before)
    detach()
    assert "train_batch" not in vars(engine)
    engine.destroy()


def case_pipeline_without_master_weights_is_refused(folder: Path) -> None:
    engine = make_pipeline(stages=2, stage=0, dtype="fp32")
    with pytest.raises(UnsupportedError, match="pipeline stages"):
        DeepSpeedLoop(engine)
    engine.destroy()
