"""Cases that capture the original training, with eager copies of the steps that later processes compare with.

Each case leaves a history in the folder, and for each rank the state that `deepspeed_cases_again` must restore in new
processes.
"""

import os
from pathlib import Path
from typing import Any

import torch
from deepspeed_eager import Eager, state_of
from deepspeed_helpers import WideGPT, make_engine, train
from faulty_writer import faults_in_new_writers

import capture

FULL: dict[str, dict[str, Any]] = {
    "stage-0": {"stage": 0},
    "stage-0-fp32": {"stage": 0, "dtype": "fp32"},
    "stage-1": {"stage": 1, "accumulation": 2},
    "stage-2": {"stage": 2},
    "stage-3": {"stage": 3},
    "stage-3-fp32": {"stage": 3, "dtype": "fp32"},
}
RESTORED, LAST = 30, 60


def note(folder: Path, name: str) -> Path:
    return folder / f"{name}-{os.environ['WORLD_SIZE']}-{os.environ['RANK']}.pt"


def history_of(folder: Path, name: str, *, world: int) -> Path:
    return folder / f"history-{name}-{world}"


def case_original_trainings(folder: Path) -> None:
    for name, settings in FULL.items():
        engine = make_engine(**settings)
        torch.manual_seed(23 + int(os.environ["RANK"]))
        history = history_of(folder, name, world=int(os.environ["WORLD_SIZE"]))
        with capture.enable(engine, every=10, history=history) as session:
            train(engine, RESTORED)
            middle = state_of(engine)
            losses = train(engine, LAST - RESTORED)
            last = state_of(engine)
        assert session.stats.failed == 0
        torch.save([losses, middle.tensors, middle.objects, last.tensors, last.objects], note(folder, name))
        engine.destroy()


def case_torn_snapshots(folder: Path) -> None:
    """With a slow writer, a snapshot at every step and early updates, every checkpoint equals the eager copy of its
    step.
    """
    import native

    for stage in (2, 3):
        engine = make_engine(stage=stage, model=WideGPT)
        history = folder / f"torn-{stage}-{os.environ['WORLD_SIZE']}"
        copies: dict[int, Eager] = {0: state_of(engine)}
        with faults_in_new_writers(native.Faults(delay_us=5_000)):
            session = capture.enable(engine, every=1, history=history, budget_bytes=16 << 20)
        with session:
            for _ in range(5):
                train(engine, 1)
                copies[engine.global_steps] = state_of(engine)
        assert session.stats.snapshots == 6
        torch.distributed.barrier()
        for step, eager in copies.items():
            stored = capture.restore(step, history=history)
            assert isinstance(stored, dict)
            for (kind, name), tensor in eager.without_buffers().tensors.items():
                assert torch.equal(stored[kind][name], tensor), (step, kind, name)
        engine.destroy()


def case_metrics_reach_the_history(folder: Path) -> None:
    from catalog.history import History

    engine = make_engine(stage=2)
    history = folder / f"metrics-{os.environ['WORLD_SIZE']}"
    with capture.enable(engine, every=5, history=history):
        losses = train(engine, 6)
    everyone: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    torch.distributed.all_gather_object(everyone, losses)
    rows = History.open(history).query("SELECT step, value FROM metrics WHERE name = 'loss' ORDER BY step").to_pylist()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row, values in zip(rows, zip(*everyone, strict=True), strict=True):
        assert abs(row["value"] - sum(values) / len(values)) < 1e-5
    names = History.open(history).query("SELECT DISTINCT name FROM metrics").to_pylist()
    assert {row["name"] for row in names} >= {"loss", "lr", "grad_norm", "step_time_s", "applied"}
    engine.destroy()


def case_destroy_closes_the_session(folder: Path) -> None:
    engine = make_engine(stage=2)
    history = folder / f"destroyed-{os.environ['WORLD_SIZE']}"
    capture.enable(engine, every=100, history=history)
    train(engine, 3)
    engine.destroy()
    torch.distributed.barrier()
    stored = capture.restore("latest", history=history, names=["gain"])
    assert isinstance(stored, dict)
    assert stored["model"]["gain"].shape == (3,)
