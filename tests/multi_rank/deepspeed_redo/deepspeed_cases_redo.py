"""Cases for redo logs of DeepSpeed engines: each step that is made again has the bits that the training had."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_eager import Eager, assert_same, state_of
from deepspeed_helpers import FP16, allow_fp16, make_engine, train, with_client
from disk_watcher import watched
from ranks import covers, guards
from redo_helpers import with_another_bit, with_other_writes

import capture
from capture.redo.key_frames import compare_key_frame, key_frames
from catalog.encoding.planes import is_indexed
from catalog.errors import MismatchError, NotFoundError, UnsupportedError
from catalog.format.redo_reader import open_blocks, read_redo_segment
from catalog.format.redo_segment import RedoSegment, RedoWrites, redo_segments
from catalog.history import History
from catalog.read.redo import recorded_steps
from catalog.retention.facts import bytes_on_disk
from catalog.verify import verify

WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
EVERY, LAST = 4, 6
LATER: dict[str, Eager] = {}
"""The last states of trainings, for cases that go on from a step before."""


def recorded(
    history: Path,
    *,
    between: Callable[[int, Any], None] = lambda step, engine: None,
    looks_at: str = "sampled",
    **settings: Any,
) -> dict[int, Eager]:
    """Train with a redo log; return a copy of the state after each step."""
    engine = make_engine(**settings)
    torch.manual_seed(11 + RANK)
    states = {}
    options = {"every": EVERY, "check": looks_at, "redo": True, "stats_every": 0}
    with capture.enable(engine, history=history, **options) as session:
        for step in range(1, LAST + 1):
            train(engine, 1)
            states[step] = state_of(engine)
            between(step, engine)
    assert session.failures == []
    engine.destroy()
    torch.distributed.barrier()
    return states


def check(history: Path, **settings: Any) -> None:
    """Compare every step of a training with its copy: each process, without the others, makes what all ranks had."""
    states = recorded(history, **settings)
    opened = History.open(history)
    run = opened.current_run()
    assert opened.steps(run) == [0, EVERY, LAST]
    assert recorded_steps(opened.paths, run) == list(range(1, LAST + 1))
    for step, eager in states.items():
        made = capture.restore(step, history=history)
        found = {(kind, name): tensor for kind, tensors in made.items() for name, tensor in tensors.items()}
        for key, tensor in eager.tensors.items():
            if key[0] != "buffer" or RANK == 0:
                same = torch.equal(tensor.reshape(-1).view(torch.uint8), found[key].reshape(-1).view(torch.uint8))
                assert same, f"step {step} of {history.name}: {key}"
    if RANK == 0:
        assert [compare_key_frame(opened, frame) > 0 for frame in key_frames(opened, run)] == [True, True]
        torch.save(states[3].tensors, history.parent / f"{history.name}.pt")
    LATER[history.name] = states[LAST]


def has_indexed(history: History) -> bool:
    """Return whether this rank has logged a gradient by the index of its mantissas."""
    paths, run = history.paths, history.current_run()
    own = [name for name in redo_segments(paths, run) if name.rank == RANK]
    segments = [read_redo_segment(paths.redo_dir(run) / name.name, run=run) for name in own]
    return any(has_indexed_block(segment) for segment in segments)


def has_indexed_block(segment: RedoSegment) -> bool:
    with open_blocks(segment) as read:
        return any(is_indexed(read(block)) for step in segment.steps for block in step.blocks)


@guards("A redo step has the bits of the training")
@covers("the redo log: ZeRO 2 and 3 in bf16, and ZeRO 1 in fp16 with skipped updates, with torch's AdamW")
def case_steps_are_made_again(folder: Path) -> None:
    allow_fp16()
    check(folder / "2", stage=2, looks_at="hash")
    check(folder / "3", stage=3)
    check(folder / "fp16", stage=1, dtype="fp16", fp16=FP16)
    # Clipped gradients of bf16 are products with one factor, and those of fp16 have more mantissas.
    assert [has_indexed(History.open(folder / name)) for name in ("2", "3", "fp16")] == [True, True, False]


@guards("Resume is exact")
@covers("going on from a step of a redo log: ZeRO 3")
def case_a_training_goes_on_from_a_step_of_the_log(folder: Path) -> None:
    engine = make_engine(stage=3, seed=99)
    capture.restore(3, history=folder / "3", engine=engine)
    train(engine, LAST - 3)
    assert_same(state_of(engine), LATER["3"])
    engine.destroy()


def damaged(folder: Path, name: str) -> History:
    """Return a copy of the history of ZeRO 2 for this rank alone."""
    shutil.copytree(folder / "2", folder / f"{name}-{RANK}")
    return History.open(folder / f"{name}-{RANK}")


@guards("A redo step has the bits of the training")
def case_another_gradient_is_found(folder: Path) -> None:
    """Whose checksums are right, so that only the fingerprint of the rank tells; it is of all bytes here."""
    history = damaged(folder, "gradient")
    with_another_bit(history, history.current_run(), rank=1, step=3)
    assert capture.restore(2, history=history.root)
    with pytest.raises(MismatchError, match=r"step 3 of run .* on rank 1: .* differs from the fingerprint"):
        capture.restore(3, history=history.root)


@guards("A redo step has the bits of the training")
def case_a_rank_without_a_log_is_named(folder: Path) -> None:
    history = damaged(folder, "rank")
    run = history.current_run()
    for name in redo_segments(history.paths, run):
        if name.rank == 1:
            (history.paths.redo_dir(run) / name.name).unlink()
    assert recorded_steps(history.paths, run) == []
    with pytest.raises(NotFoundError, match="the redo log of rank 1 has no record of step 1"):
        capture.restore(2, history=history.root)


@guards("A redo step has the bits of the training")
def case_logs_that_do_not_belong_together_are_refused(folder: Path) -> None:
    """In which a parameter is missing, or a part of one, as among the logs of another world size."""
    for name, kept, message in (
        ("whole", slice(None, -1), r"does not update '.*', and the optimizer of .* does"),
        ("part", slice(1, None), r"does not update every element of '.*' of .* once"),
    ):

        def without_some(writes: RedoWrites, kept: slice = kept) -> RedoWrites:
            first, *others = writes.flats
            return replace(writes, flats=(replace(first, fragments=first.fragments[kept]), *others))

        history = damaged(folder, name)
        with_other_writes(history, history.current_run(), rank=1, step=1, change=without_some)
        with pytest.raises(MismatchError, match=message):
            capture.restore(1, history=history.root)


@guards("A redo step has the bits of the training")
def case_what_no_update_has_made_is_refused(folder: Path) -> None:
    def write(step: int, engine: Any) -> None:
        if step == 2 and RANK == 1:
            with torch.no_grad():
                engine.module.gain.mul_(2.0)

    history = folder / "written"
    recorded(history, stage=2, between=write)
    assert capture.restore(1, history=history)
    with pytest.raises(MismatchError, match=r"after step 2 .* on rank 1: gain was written outside the update"):
        capture.restore(3, history=history)
    assert capture.restore(5, history=history)


def case_an_unknown_update_is_refused(folder: Path) -> None:
    engine = with_client(torch.optim.RMSprop, 7, stage=2)
    with pytest.raises(UnsupportedError, match=r"torch\.optim\.rmsprop\.RMSprop may read more than gradients"):
        capture.enable(engine, history=folder / "refused", redo=True)
    engine.destroy()


@guards("A byte budget holds")
@covers("a byte budget over the redo logs of both ranks: ZeRO 2")
def case_the_logs_of_all_ranks_keep_to_a_budget(folder: Path) -> None:
    """All checkpoints have a tag and stay, so steps go, until neither a checkpoint nor a step finds room any more."""
    recorded(folder / "measured", stage=2, dtype="bf16")
    budget = bytes_on_disk(folder / "measured" / "runs") + (512 << 10)
    engine, history = make_engine(stage=2, dtype="bf16"), folder / "budget"
    options = {"every": EVERY, "redo": True, "stats_every": 0, "keep": f"{budget}B"}
    torch.distributed.barrier()
    with watched(history / "runs") as seen:
        with capture.enable(engine, history=history, **options) as session:
            while session.step < 8 * EVERY:
                train(engine, 1)
                if RANK == 0 and session.step % EVERY == 0:
                    session.tag(f"at-{session.step}")
        torch.distributed.barrier()
    engine.destroy()
    assert budget // 2 < seen.most_bytes <= budget, (seen, budget)
    opened = History.open(history)
    left_out = opened.query("SELECT DISTINCT rank FROM events WHERE name = 'redo_left_out' ORDER BY rank")
    assert left_out["rank"].to_pylist() == [0, 1]
    assert opened.query("SELECT * FROM events WHERE name = 'redo_removed'").num_rows, "it has begun"
    assert verify(opened) == []
