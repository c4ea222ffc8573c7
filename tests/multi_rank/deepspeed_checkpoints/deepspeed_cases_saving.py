"""Cases for events while a checkpoint is being written: early updates, failing disks, `latest`, closing."""

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import DecoupledCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed_cases_engine import assert_equal, native, save_both_ways, state_files
from deepspeed_helpers import TinyGPT, WideGPT, config, make_engine, train
from deepspeed_splits import make_pipeline, train_pipeline
from faulty_writer import faults_in_new_writers

import capture
from capture.deepspeed_checkpoints.torch_files import load_torch_file
from catalog.errors import SetupError, SnapshotError, UnsupportedError
from native import Faults

RANK = int(os.environ["RANK"])
SLOW = 20_000


def torch_file(path: Path) -> Any:
    return load_torch_file(path, map_location="cpu", classes=(), pickle=True)


def updates_while_it_is_written(engine: Any, go_on: Callable[[int], object], folder: Path) -> int:
    """Save with a slow writer and update at once; assert that every file equals the torch engine's file of the save.

    Return the number of bytes that were read late.
    """
    go_on(2)
    engine.save_checkpoint(str(folder / "torch"), tag="a")
    saver = native(engine, budget_bytes=1 << 20, backend="posix")
    with faults_in_new_writers(Faults(delay_us=SLOW)):
        engine.save_checkpoint(str(folder / "native"), tag="a")
    late = sum(write.live_bytes for write in saver._unreleased)
    go_on(3)
    saver.wait()
    deepspeed.comm.barrier()
    for path in state_files(folder / "torch" / "a"):
        assert_equal(saver.load(str(folder / "native" / "a" / path.name), "cpu"), torch_file(path))
    engine.destroy()
    return late


def case_early_updates_tear_nothing(folder: Path) -> None:
    for stage, dtype in [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "bf16")]:
        engine = make_engine(model=WideGPT, stage=stage, dtype=dtype)
        late = updates_while_it_is_written(engine, lambda n, e=engine: train(e, n), folder / f"early-{stage}-{dtype}")
        # The test is meaningful only if large tensors are really read while the training continues.
        assert late > (5 << 20 if stage or RANK == 0 else -1), (stage, dtype, late)


def case_accumulated_and_offloaded_states_are_whole(folder: Path) -> None:
    engine = make_engine(model=WideGPT, stage=2, accumulation=2)
    updates_while_it_is_written(engine, lambda n: train(engine, n), folder / "accumulated")
    offload = {"offload_optimizer": {"device": "cpu"}}
    engine = make_engine(model=WideGPT, stage=2, zero=offload, zero_force_ds_cpu_optimizer=False)
    updates_while_it_is_written(engine, lambda n: train(engine, n), folder / "offloaded")


def case_a_save_between_backward_and_step(folder: Path) -> None:
    engine = make_engine(model=WideGPT, stage=1)

    def go_on(steps: int) -> None:
        for _ in range(steps):
            engine.backward(engine(torch.arange(18).view(2, 9)))
            engine.save_checkpoint(str(folder / "between"), tag="b")
            engine.step()

    go_on(1)
    updates_while_it_is_written(engine, go_on, folder / "between-a")


def case_without_laziness_all_is_copied_at_the_call(folder: Path) -> None:
    engine = make_engine(model=WideGPT, stage=1)
    train(engine, 1)
    saver = native(engine, lazy=False, budget_bytes=1 << 20, backend="posix")
    with faults_in_new_writers(Faults(delay_us=1000)):
        engine.save_checkpoint(str(folder / "copied"))
    assert sum(write.live_bytes for write in saver._unreleased) == 0
    assert saver.eager_because == "lazy=False"
    engine.destroy()


def case_edits_before_the_update_fail_that_save_by_name(folder: Path) -> None:
    engine = make_engine(model=WideGPT, stage=0, dtype="fp32")
    train(engine, 1)
    # Slow, so that the edit comes while the tensor is being read, however busy the machine is.
    saver = native(engine, budget_bytes=1 << 20, backend="posix")
    with faults_in_new_writers(Faults(delay_us=SLOW)):
        engine.save_checkpoint(str(folder / "edited"), tag="good")
    saver.release()
    with torch.no_grad():
        engine.module.wide[0].weight.mul_(2)
    saver.wait()
    engine.save_checkpoint(str(folder / "edited"), tag="bad")
    with torch.no_grad():
        engine.module.wide[0].weight.mul_(2)
    if RANK == 0:
        with pytest.raises(SnapshotError, match=r"bad.*wide\.0\.weight.*release\(\)"):
            saver.wait()
    else:
        saver.wait()
    deepspeed.comm.barrier()
    assert (folder / "edited" / "latest").read_text() == "good"
    engine.destroy()


def case_a_full_disk_leaves_latest_where_it_was(folder: Path) -> None:
    where = folder / "full"
    engine = make_engine(stage=1)
    train(engine, 1)
    saver = native(engine)
    engine.save_checkpoint(str(where), tag="old")
    saver.wait()
    # Only the disk of one rank fails. The part of the other rank is complete, but there must be no checkpoint.
    full = Faults(fail_after=0, errno=errno.ENOSPC) if RANK == 1 else None
    saver = native(engine, backend="posix")
    with faults_in_new_writers(full):
        engine.save_checkpoint(str(where), tag="new")
    saver._saves.wait()
    deepspeed.comm.barrier()
    assert (where / "latest").read_text() == "old"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(engine, 1)
    assert [str(RANK) for w in said if "not whole on rank" in str(w.message)] == ["1"] * RANK
    if RANK == 1:
        with pytest.raises(SnapshotError, match=r"new is not whole on rank 1.*latest was not moved.*No space left"):
            saver.wait()
        saver.wait()
        assert not [path for path in (where / "new").iterdir() if path.name.endswith(".tmp")]
        assert len(state_files(where / "new")) == 2
    path, _ = engine.load_checkpoint(str(where))
    assert path is not None
    assert "old" in path
    saver = native(engine)
    engine.save_checkpoint(str(where), tag="newer")
    path, _ = engine.load_checkpoint(str(where))
    assert path is not None
    assert "newer" in path
    engine.destroy()


def case_a_file_that_can_not_be_made_is_a_failed_save(folder: Path) -> None:
    engine = make_engine(stage=3)
    saver = native(engine)
    engine.save_checkpoint(str(folder / "made"), tag="a")
    # A file takes the place of the tag's folder.
    if RANK == 0:
        (folder / "made" / "b").touch()
    deepspeed.comm.barrier()
    engine.save_checkpoint(str(folder / "made"), tag="b")
    with pytest.raises(SnapshotError, match=r"b is not whole.*Not a directory"):
        saver.wait()
    deepspeed.comm.barrier()
    assert (folder / "made" / "latest").read_text() == "a"
    engine.destroy()


def case_a_waiting_save_is_whole_when_the_call_returns(folder: Path) -> None:
    engine = make_engine(stage=1)
    native(engine, wait=True, backend="posix")
    with faults_in_new_writers(Faults(delay_us=SLOW * (1 + RANK))):
        for tag in ("a", "b"):
            engine.save_checkpoint(str(folder / "waiting"), tag=tag)
            assert (folder / "waiting" / "latest").read_text() == tag
            assert not [path.name for path in (folder / "waiting" / tag).iterdir() if path.name.endswith(".tmp")]
    # What one rank can't save, no rank takes for saved.
    full = Faults(fail_after=0, errno=errno.ENOSPC) if RANK == 1 else None
    native(engine, wait=True, backend="posix")
    failing = pytest.raises((SnapshotError, SetupError), match=r"c is not whole on rank 1.*No space left")
    with faults_in_new_writers(full), failing:
        engine.save_checkpoint(str(folder / "waiting"), tag="c")
    assert (folder / "waiting" / "latest").read_text() == "b"
    engine.destroy()


class StepCounter(torch.optim.AdamW):
    """Keeps a `tensor_step` of shape (1,) beside each parameter's state."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["tensor_step"] = state.get("tensor_step", torch.zeros(1)) + 1
        return loss


def case_an_optimizer_with_state_of_another_shape(folder: Path) -> None:
    def make() -> Any:
        torch.manual_seed(7)
        settings = config(stage=1, world=int(os.environ["WORLD_SIZE"]))
        del settings["optimizer"]
        module = TinyGPT()
        optimizer = StepCounter(module.parameters(), lr=0.01)
        return deepspeed.initialize(
            model=module, optimizer=optimizer, config={**settings, "zero_allow_untested_optimizer": True}
        )[0]

    engine = make()
    native(engine)
    train(engine, 2)
    engine.save_checkpoint(str(folder / "counted"), tag="a")
    expected = [
        {key: value.clone() for key, value in state.items()} for state in engine.optimizer.optimizer.state.values()
    ]
    # What the next updates write must not reach the files.
    train(engine, 2)
    other = make()
    native(other)
    other.load_checkpoint(str(folder / "counted"))
    found = list(other.optimizer.optimizer.state.values())
    assert [state.keys() for state in found] == [state.keys() for state in expected]
    assert all(torch.equal(a[key], b[key]) for a, b in zip(found, expected, strict=True) for key in b)
    assert found[0]["tensor_step"].tolist() == [2.0]
    train(other, 1)
    engine.destroy()
    other.destroy()


def case_many_saves_are_on_their_way_at_once(folder: Path) -> None:
    engine = make_engine(stage=1)
    saver = native(engine, budget_bytes=1 << 20, backend="posix")
    expected = []
    for step in range(4):
        train(engine, 1)
        with faults_in_new_writers(Faults(delay_us=SLOW)):
            engine.save_checkpoint(str(folder / "many"), save_latest=step != 3)
        expected.append(engine.optimizer.single_partition_of_fp32_groups[0].detach().clone())
    engine.save_checkpoint(str(folder / "many"), tag="global_step1")  # A save under this tag may still be in progress.
    saver.wait()
    deepspeed.comm.barrier()
    assert (folder / "many" / "latest").read_text() == "global_step1"
    expected[0] = expected[3]
    for step, one in enumerate(expected):
        name = f"bf16_zero_pp_rank_{RANK}_mp_rank_00_optim_states.pt"
        state = saver.load(str(folder / "many" / f"global_step{step + 1}" / name))
        stored = state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
        assert torch.equal(stored, one[: stored.numel()])
    engine.destroy()


def case_it_is_deepspeeds_and_closes_once(folder: Path) -> None:
    engine = make_engine(stage=1)
    before = set(vars(engine))
    first = native(engine)
    assert isinstance(first, CheckpointEngine)
    assert engine.checkpoint_engine is first
    second = native(engine)
    assert engine.checkpoint_engine is second
    engine.save_checkpoint(str(folder / "closed"))
    second.cleanup()
    second.cleanup()
    second.close()
    first.close()
    assert isinstance(engine.checkpoint_engine, TorchCheckpointEngine)
    assert set(vars(engine)) - {"_curr_ckpt_path"} == before
    assert "step" not in vars(engine.optimizer)
    deepspeed.comm.barrier()
    assert (folder / "closed" / "latest").read_text() == "global_step0"
    engine.save_checkpoint(str(folder / "closed"), tag="theirs")
    native(engine)
    engine.destroy()
    engine.destroy()


def case_what_the_first_rank_alone_would_save_is_refused_by_all(folder: Path) -> None:
    """Of a replicated training the first rank alone saves what the user gives, and no other waits for it for ever."""
    engine = make_engine(stage=1)
    saver = native(engine)
    odd = {"odd": Odd(5)}
    refusal = UnsupportedError if deepspeed.comm.get_rank() == 0 else SetupError
    with pytest.raises(refusal, match=r"\['odd'\].*Odd.*pickle=True"):
        engine.save_checkpoint(str(folder / "replicated"), tag="a", client_state=odd)
    saver.wait()
    assert not (folder / "replicated" / "latest").exists()
    engine.save_checkpoint(str(folder / "replicated"), tag="b", client_state={"even": 4})
    saver.wait()
    deepspeed.comm.barrier()
    assert (folder / "replicated" / "latest").read_text() == "b"
    engine.destroy()


def case_what_is_no_data_is_refused_by_name(folder: Path) -> None:
    engine = make_engine(stage=3)
    saver = native(engine)
    odd = {"model": {"odd": [1, Odd(5)]}}
    with pytest.raises(UnsupportedError, match=r"\['model'\]\['odd'\]\[1\].*Odd.*pickle=True"):
        engine.save_checkpoint(str(folder / "odd"), tag="a", client_state=odd)
    deepspeed.comm.barrier()
    saver.wait()
    assert not (folder / "odd" / "latest").exists()
    saver = native(engine, pickle=True)
    engine.save_checkpoint(str(folder / "odd"), tag="b", client_state=odd)
    _, client = engine.load_checkpoint(str(folder / "odd"))
    assert client["model"]["odd"][1].value == 5
    saver = native(engine)
    with pytest.raises(ValueError, match=r"a pickled \S*\.Odd.*pickle=True"):
        engine.load_checkpoint(str(folder / "odd"))
    engine.destroy()


def case_what_can_not_work_is_refused(folder: Path) -> None:
    engine = make_engine(stage=1)
    for wrong, settings in ((engine.module, {}), (engine, {"backend": "aio"})):
        with pytest.raises(SetupError, match=r"DeepSpeed engine, got TinyGPT|backend='aio'"):
            capture.checkpoint_engine(wrong, **settings)
    theirs, engine.checkpoint_engine = engine.checkpoint_engine, DecoupledCheckpointEngine(None, None, False)
    with pytest.raises(SetupError, match="DecoupledCheckpointEngine, which saves in the background too"):
        native(engine)
    engine.checkpoint_engine = theirs
    engine.destroy()
    engine = make_engine(stage=1, checkpoint={"use_node_local_storage": True})
    with pytest.raises(UnsupportedError, match="use_node_local_storage"):
        native(engine)
    engine.destroy()


class Odd:
    def __init__(self, value: int) -> None:
        self.value = value


def case_sixteen_bit_weights_stay_a_torch_file(folder: Path) -> None:
    engine = make_engine(stage=1)
    native(engine)
    engine.save_16bit_model(str(folder / "sixteen"))
    deepspeed.comm.barrier()
    stored = torch.load(folder / "sixteen" / "pytorch_model.bin", weights_only=True)
    assert_equal(stored, engine.module.state_dict())
    assert [path.name for path in (folder / "sixteen").iterdir()] == ["pytorch_model.bin"]
    engine.destroy()


def case_beside_a_history(folder: Path) -> None:
    engine = make_engine(model=WideGPT, stage=2)
    with capture.enable(engine, every=1, history=folder / "beside"):
        updates_while_it_is_written_beside(engine, folder)
    deepspeed.comm.barrier()
    assert capture.restore(2, history=folder / "beside")
    engine.destroy()


def updates_while_it_is_written_beside(engine: Any, folder: Path) -> None:
    train(engine, 2)
    theirs, ours = save_both_ways(engine, folder / "both")
    train(engine, 2)
    for path in state_files(theirs / "global_step2"):
        assert_equal(engine.checkpoint_engine.load(str(ours / "global_step2" / path.name), "cpu"), torch_file(path))
    engine.checkpoint_engine.close()


# This case is last because a pipeline leaves its grid behind in DeepSpeed's globals.


def case_pipelines_reach_the_barrier(folder: Path) -> None:
    for number, settings in enumerate([{"stage": 1}, {"stage": 0}]):
        engine = make_pipeline(stages=2, **settings)
        updates_while_it_is_written(engine, lambda n, e=engine: train_pipeline(e, n), folder / f"pipeline-{number}")


def case_left_open_at_exit(folder: Path) -> None:
    engine = make_pipeline(stages=2, stage=1)
    train_pipeline(engine, 1)
    native(engine, budget_bytes=1 << 20, backend="posix")
    with faults_in_new_writers(Faults(delay_us=SLOW)):
        engine.save_checkpoint(str(folder / "left"), tag="last")
    globals()["kept"] = engine
