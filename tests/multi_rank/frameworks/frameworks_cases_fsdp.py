"""Cases for FSDP2 (fully_shard) on two ranks on the CPU: captured, restored, trained on to the same bits."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from capture_helpers import assert_same
from faulty_writer import faults_in_new_writers
from frameworks_helpers import (
    Training,
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
from ranks import covers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import capture
import native
from catalog.errors import MismatchError, SnapshotError, UnsupportedError
from catalog.history import History


def sharded(model: nn.Module, *, reshard: bool | None = None) -> nn.Module:
    """Shard `model` and its blocks over all ranks in place, and return it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in [*getattr(model, "blocks", ()), *([model.wide] if hasattr(model, "wide") else ())]:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def fsdp(seed: int) -> Training:
    return with_optimizer(sharded(tiny(seed)))


def kept_gathered(seed: int) -> Training:
    """Return a training whose weights stay gathered from forward to backward, or until the next forward without
    backward.
    """
    return with_optimizer(sharded(tiny(seed), reshard=False))


def compiled(seed: int) -> Training:
    return with_optimizer(torch.compile(sharded(tiny(seed)), backend="eager"))


@covers("FSDP2 (`fully_shard`, DTensor); and into a plain module, and back")
def case_fsdp(folder: Path) -> None:
    goes_on_exactly(fsdp, folder / "fsdp")
    crosses(fsdp, folder / "fsdp")


def case_every_rank_writes_its_shard(folder: Path) -> None:
    opened = History.open(folder / "fsdp")
    extents = [e for e in opened.extents(opened.resolve(2)) if e.kind in ("model", "exp_avg")]
    assert {e.placement for e in extents} == {"partitioned"}

    def ranges(name: str) -> list[tuple[int, int, int]]:
        return sorted((int(e.file[-17:-12]), e.start, e.numel) for e in extents if (e.kind, e.name) == ("model", name))

    assert ranges("place") == [(0, 0, 100), (1, 100, 80)], "rows that don't divide"
    assert ranges("gain") == [(0, 0, 3)], "the second rank holds nothing of a single row"
    assert {e.name for e in extents if e.kind == "model"} == {name for name, _ in tiny(1).named_parameters()}


@covers("FSDP2 with `reshard_after_forward=False`")
def case_weights_that_stay_gathered(folder: Path) -> None:
    goes_on_exactly(kept_gathered, folder / "gathered")


@covers("FSDP2 of a compiled module")
def case_compiled(folder: Path) -> None:
    goes_on_exactly(compiled, folder / "compiled-fsdp")


def case_a_slow_disk_tears_nothing(folder: Path) -> None:
    training, states = kept_gathered(1), {}

    def keep(step: int) -> None:
        states[step] = whole_state(training[0], training[1])

    with faults_in_new_writers(native.Faults(delay_us=20_000)):
        session = enabled(training, folder / "slow")
    with session:
        train(training, 4, start=0, after=keep)
        session.wait(timeout_s=60)
    for step in (1, 2, 3, 4):
        stored = capture.restore(step, history=folder / "slow")
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            found = {name: stored[kind][name] for name in states[step][kind]}
            assert_same({kind: found}, {kind: states[step][kind]})


def case_a_snapshot_while_weights_are_gathered(folder: Path) -> None:
    training = kept_gathered(1)
    model, optimizer, _ = training
    with enabled(training, folder / "while", every=100) as session:
        train(training, 3, start=0)
        expected = whole_state(model, optimizer)
        evaluate(model)
        assert not isinstance(model.place, DTensor), "the case needs gathered weights"
        session.snapshot()
        session.wait()
        losses = train(training, 2, start=3)
    other = restored(kept_gathered(2), 3, folder / "while")
    reached = whole_state(other[0], other[1])
    assert_same({k: reached[k] for k in ("model", "exp_avg")}, {k: expected[k] for k in ("model", "exp_avg")})
    assert train(other, 2, start=3) == losses


def evaluate(model: nn.Module) -> None:
    """Run a forward that leaves the weights gathered, and buffers and generators unchanged."""
    generators, buffers = torch.get_rng_state(), [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        model(torch.zeros(2, 9, dtype=torch.long))
    torch.set_rng_state(generators)
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)


def case_a_restore_while_weights_are_gathered(folder: Path) -> None:
    expected = train(restored(kept_gathered(2), 2, folder / "gathered"), 2, start=2)
    other = kept_gathered(3)
    evaluate(other[0])
    assert not isinstance(other[0].place, DTensor)
    assert train(restored(other, 2, folder / "gathered"), 2, start=2) == expected


def case_an_edit_is_found_and_named(folder: Path) -> None:
    training = fsdp(1)
    session = enabled(training, folder / "edited")
    train(training, 1, start=0)
    with torch.no_grad():
        training[0].wide[0].weight.mul_(2)
    train(training, 1, start=1)
    with pytest.raises(SnapshotError, match=r"model 'wide\.0\.weight'"):
        session.wait()
    session.close()


def case_a_checkpoint_of_a_larger_model_is_refused(folder: Path) -> None:
    smaller = tiny(1)
    del smaller.blocks[1]
    model = sharded(smaller)
    before = whole_state(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(MismatchError, match=r"only in the checkpoint \(blocks\.1"):
        capture.restore(2, history=folder / "fsdp", model=model)
    assert_same(whole_state(model, torch.optim.SGD(model.parameters())), before)


@covers("refused by name: DTensors on part of the ranks, HSDP, blocks that are no single range")
def case_other_placements_are_refused_by_name(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 6)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    with pytest.raises(UnsupportedError, match=r"'weight' of shape \(6, 4\).*Shard\(dim=1\)"):
        capture.enable(model, optimizer=torch.optim.SGD(model.parameters()), history=folder / "refused")


@covers("refused by name: `FullyShardedDataParallel`, the first FSDP")
def case_the_first_fsdp_is_refused_by_name(folder: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 6), device_id=torch.device("cpu")))
    with pytest.raises(UnsupportedError, match=r"'0' is wrapped in FullyShardedDataParallel.*fully_shard"):
        capture.enable(model, optimizer=torch.optim.SGD(model.parameters()), history=folder / "refused")


def case_for_one_rank_and_for_no_group(folder: Path) -> None:
    """Save the state at step 2 and the losses of rank 0, which later tests compare with."""
    training = restored(fsdp(9), 2, folder / "fsdp")
    state = whole_state(training[0], training[1])
    assert isinstance(training[0], FSDPModule)
    if rank() == 0:
        torch.save(state, folder / "expected.pt")
