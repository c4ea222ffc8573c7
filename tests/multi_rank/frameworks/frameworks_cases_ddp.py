"""Cases for DistributedDataParallel and torch.compile on two ranks: captured, restored, trained on to the same bits."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from capture_helpers import assert_same
from disk_watcher import watched
from frameworks_helpers import (
    Training,
    all_closed,
    crosses,
    enabled,
    goes_on_exactly,
    rank,
    restored,
    tiny,
    train,
    whole_state,
    with_optimizer,
)
from ranks import covers, guards
from torch.nn.parallel import DistributedDataParallel

import capture
from capture.redo_log import redo_log
from catalog.errors import SetupError
from catalog.format.redo_reader import read_redo_segment
from catalog.format.redo_segment import redo_segments
from catalog.history import History
from catalog.read.redo import recorded_steps
from catalog.verify import verify
from dshistory import Explorer


def ddp(seed: int) -> Training:
    return with_optimizer(DistributedDataParallel(tiny(seed), broadcast_buffers=False))


def compiled(seed: int) -> Training:
    return with_optimizer(torch.compile(tiny(seed), backend="eager"))


def compiled_ddp(seed: int) -> Training:
    return with_optimizer(
        torch.compile(DistributedDataParallel(tiny(seed), broadcast_buffers=False), backend="aot_eager")
    )


def ddp_of_compiled(seed: int) -> Training:
    return with_optimizer(DistributedDataParallel(torch.compile(tiny(seed), backend="eager"), broadcast_buffers=False))


def compiled_in_place(seed: int) -> Training:
    model = tiny(seed)
    model.compile(backend="eager")
    return with_optimizer(model)


def compiled_in_part(seed: int) -> Training:
    model = tiny(seed)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    return with_optimizer(model)


@covers("DistributedDataParallel; and into a plain module, and back")
def case_ddp(folder: Path) -> None:
    goes_on_exactly(ddp, folder / "ddp")
    crosses(ddp, folder / "ddp")


@guards("A redo step has the bits of the training")
@covers("the redo log under DistributedDataParallel")
def case_ddp_steps_are_made_again(folder: Path) -> None:
    """One rank records the gradients of all, and each its own buffers and random numbers."""
    training = ddp(1)
    states = {}

    def keep(step: int) -> None:
        states[step] = whole_state(training[0], training[1])

    with enabled(training, folder / "redo", every=4, redo=True) as session:
        losses = train(training, 6, start=0, after=keep)
    all_closed()
    history = History.open(folder / "redo")
    found = [
        read_redo_segment(history.paths.redo_dir(session.run) / name.name, run=session.run)
        for name in redo_segments(history.paths, session.run)
    ]
    assert {one.rank for one in found if any(tensor.kind == "gradient" for tensor in one.tensors)} == {0}
    assert {one.rank for one in found if any(tensor.kind == "buffer" for tensor in one.tensors)} == {0, 1}
    for step, state in states.items():
        made = capture.restore(step, history=folder / "redo")
        for kind in state.keys() - ({"buffer"} if rank() else set()):
            assert_same({kind: {name: made[kind][name] for name in state[kind]}}, {kind: state[kind]})
    other = restored(ddp(2), 3, folder / "redo")
    assert_same(whole_state(other[0], other[1]), states[3])
    assert train(other, 3, start=3) == losses[3:]
    assert_same(whole_state(other[0], other[1]), states[6])


@guards("A byte budget holds")
@covers("a byte budget over checkpoints and redo logs under DistributedDataParallel")
def case_ddp_logs_and_checkpoints_keep_to_a_budget(folder: Path) -> None:
    """Rank 0 records the gradients of all, rank 1 little more than its buffers. Checkpoints fill the budget while
    gradients take little; then these take much, which nobody could foresee."""
    training, root, budget, states = ddp(1), folder / "budget", 50_000_000, {}
    is_small = True
    for parameter in training[0].parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient.sign() if is_small else None)

    def keep(step: int) -> None:
        nonlocal is_small
        is_small = step < 20
        states[step] = whole_state(training[0], training[1])
        if step % 4 == 0:
            session.wait()
            # What is removed after this commit, however late, is room for the steps after the next checkpoint.
            session._committer.make_room()

    dist.barrier()
    with watched(root / "runs") as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(redo_log, "_SEGMENT_S", 0.0)
        with enabled(training, root, every=4, redo=True, stats_every=0, keep=f"{budget}B") as session:
            train(training, 44, start=0, after=keep)
            # The last part of every rank is there before the first one looks for the last time.
            dist.barrier()
        all_closed()
    assert session.failures == []
    assert budget // 2 < seen.most_bytes <= budget, seen
    opened = History.open(root)
    recorded = recorded_steps(opened.paths, session.run)
    assert recorded[0] > 1, "old steps go"
    assert recorded[-1] > 40, "new ones come"
    ranks = {name.rank for name in redo_segments(opened.paths, session.run)}
    assert ranks == {0, 1}, "each has its share"
    made = capture.restore(recorded[-1], history=root)
    state = states[recorded[-1]]
    for kind in state.keys() - ({"buffer"} if rank() else set()):
        assert_same({kind: {name: made[kind][name] for name in state[kind]}}, {kind: state[kind]})
    assert verify(opened) == []


def case_ddp_is_stored_under_logical_names_and_once(folder: Path) -> None:
    opened = History.open(folder / "ddp")
    extents = [e for e in opened.extents(opened.resolve(2)) if e.kind in ("model", "exp_avg", "buffer")]
    names = {name for name, _ in tiny(1).named_parameters()}
    assert {e.name for e in extents if e.kind == "model"} == names
    weights = [e for e in extents if e.kind != "buffer"]
    assert {e.placement for e in weights} == {"replicated"}
    for kind in ("model", "exp_avg"):
        shares = [sum(e.nbytes for e in weights if e.kind == kind and f"rank-0000{r}" in e.file) for r in range(2)]
        assert sum(shares) == sum(p.nbytes for n, p in tiny(1).named_parameters() if kind == "model" or n != "place")
    assert all(sum(e.nbytes for e in weights if f"rank-0000{r}" in e.file) for r in range(2)), "both ranks write"
    buffers = [e for e in extents if e.kind == "buffer"]
    assert {e.placement for e in buffers} == {"rank_local"}
    assert sorted((e.name, e.file[-17:-12]) for e in buffers) == sorted(
        (name, f"0000{r}") for name in ("seen", "cache") for r in range(2)
    )


def case_every_step_has_its_loss(folder: Path) -> None:
    if rank() == 0:
        log = Explorer.open(folder / "ddp").log()
        losses = dict(zip(log["step"].to_pylist(), log["loss"].to_pylist(), strict=True))
        assert all(losses[step] is not None for step in (1, 2, 3, 4, 5)), losses


@covers("`torch.compile`")
def case_compiled(folder: Path) -> None:
    goes_on_exactly(compiled, folder / "compiled")
    crosses(compiled, folder / "compiled")


@covers("`torch.compile` around DistributedDataParallel")
def case_compiled_ddp(folder: Path) -> None:
    goes_on_exactly(compiled_ddp, folder / "compiled-ddp")
    crosses(compiled_ddp, folder / "compiled-ddp")


@covers("DistributedDataParallel around `torch.compile`")
def case_ddp_of_a_compiled_module(folder: Path) -> None:
    goes_on_exactly(ddp_of_compiled, folder / "ddp-of-compiled")


@covers("`module.compile()`")
def case_compiled_in_place(folder: Path) -> None:
    goes_on_exactly(compiled_in_place, folder / "in-place")


@covers("one submodule compiled")
def case_compiled_in_part(folder: Path) -> None:
    goes_on_exactly(compiled_in_part, folder / "in-part")
    crosses(compiled_in_part, folder / "in-part")


def case_the_inner_module_is_as_good(folder: Path) -> None:
    """The session is enabled with the inner module, and the training uses the wrappers around it."""
    training = ddp(1)
    calls = []
    model, optimizer, scheduler = training
    with enabled((model.module, optimizer, scheduler), folder / "inner") as session:
        model.module.register_forward_hook(lambda *_: calls.append(1))
        losses = train(training, 3, start=0)
        session.wait()
    state = whole_state(model, optimizer)
    other = restored(ddp(2), 2, folder / "inner")
    assert train(other, 1, start=2) == losses[2:]
    assert_same(whole_state(other[0], other[1]), state)
    assert len(calls) == 3


def case_one_session_for_a_model_and_its_wrapper(folder: Path) -> None:
    training = ddp(1)
    model, optimizer, scheduler = training
    first = enabled(training, folder / "twice")
    second = enabled((torch.compile(model.module, backend="eager"), optimizer, scheduler), folder / "twice")
    try:
        first.wait()
        assert History.open(folder / "twice").state(first.run, 0) == "committed"
    finally:
        second.close()
    try:
        first.snapshot()
    except SetupError:
        return
    raise AssertionError("the first session was to be closed by the second")


def case_a_layer_norm_that_one_rank_changes_is_named(folder: Path) -> None:
    """Gradients are averaged, so the losses stay close and the ranks never meet again; only a look at both shows it."""
    training = ddp(1)
    model, optimizer, scheduler = training
    parts = {"optimizer": optimizer, "scheduler": scheduler}
    session = capture.enable(model, every=100, history=folder / "norms", stats_every=0, **parts)

    def edit(step: int) -> None:
        if step == 4 and rank() == 1:
            with session.modify(), torch.no_grad():
                model.module.blocks[1].norm.weight[3] += 1e-3

    train(training, 6, start=0, after=edit)
    session.close()
    dist.barrier()
    table = Explorer.open(folder / "norms").rank_agreement()
    (first,) = table
    assert (first["name"], first["kind"], first["step"], first["last"]) == ("blocks.1.norm.weight", "model", 4, 6)
    assert first["ranks"] == [[0], [1]]
    assert "differ, first at step 4: model 'blocks.1.norm.weight'" in table.note
    assert len(Explorer.open(folder / "norms").fingerprints()) == 2 * 7


def case_ranks_that_agree_say_so(folder: Path) -> None:
    table = Explorer.open(folder / "ddp").rank_agreement()
    assert len(table) == 0
    assert "on several ranks agree at" in table.note
