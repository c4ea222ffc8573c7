"""Foreign checkpoints become a history with the same bits under their steps, and nothing in them is executed."""

import json
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from capture_helpers import Net, bits, make, one_step
from catalog_helpers import flip_bit

import capture
import dshistory
from catalog.errors import FormatError, NotFoundError, SetupError, UnsupportedError
from dshistory.commands import cli
from dshistory.explorer import Explorer


def stored(explorer: Explorer, step: int) -> dict[str, dict[str, torch.Tensor]]:
    state: dict[str, dict[str, torch.Tensor]] = explorer.restore(step)
    return state


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def sound(root: Path) -> Explorer:
    explorer = Explorer.open(root)
    assert not len(explorer.verify(quiet=True))
    return explorer


@pytest.fixture
def states() -> dict[int, dict[str, torch.Tensor]]:
    """Return a state dict at three steps; `table` is large and never changes, `moving` is as large and does."""
    table = torch.randn(300, 100)
    made = {}
    for step in (10, 20, 30):
        weight = torch.randn(5, 3) * step
        made[step] = {"weight": weight, "tied": weight, "low": torch.randn(7).bfloat16(), "table": table}
        made[step]["moving"] = torch.randn(300, 100)
        made[step] |= {
            "count": torch.tensor(step),
            "none": torch.zeros(0, 3),
            "flags": torch.tensor([True, False, True]),
        }
    return made


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_an_exported_checkpoint_comes_back_bit_for_bit(format, tmp_path):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=tmp_path / "history"):
        for _ in range(2):
            one_step(model, optimizer)
    (tmp_path / "out").mkdir()
    suffix = {"safetensors": ".safetensors", "torch": ".pt", "dcp": ""}[format]
    for step in (1, 2):
        Explorer.open(tmp_path / "history").export(step, tmp_path / "out" / f"step_{step}{suffix}", format=format)
    table = dshistory.import_checkpoint(tmp_path / "out", history=tmp_path / "again")
    assert [(row["step"], row["format"], row["left_out"]) for row in table] == [(1, format, None), (2, format, None)]
    before, after = Explorer.open(tmp_path / "history"), sound(tmp_path / "again")
    for step in (1, 2):
        was = stored(before, step)
        same(stored(after, step)["model"], {**was["model"], **was["buffer"]})
    rows = {row["name"]: row["relative_update"] for row in before.diff(1, 2)}
    assert {row["name"]: row["relative_update"] for row in after.diff(1, 2) if row["name"] in rows} == rows


def test_a_hugging_face_folder_with_shards(states, tmp_path):
    from huggingface_hub import save_torch_state_dict

    for step, state in states.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_torch_state_dict(
            {**state, "tied": state["weight"].clone()}, tmp_path / f"checkpoint-{step}", max_shard_size=100
        )
        assert list((tmp_path / f"checkpoint-{step}").glob("*.index.json"))
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text("{}")
    table = dshistory.import_checkpoint(tmp_path, history=tmp_path / "history")
    assert {row["left_out"] for row in table} == {"config.json"}
    explorer = sound(tmp_path / "history")
    for step, state in states.items():
        same(stored(explorer, step)["model"], state)


def test_a_trainers_folder_is_its_steps(states, tmp_path):
    """The last weights, a pickle and logs beside the checkpoints do not count; the pickle in each is named."""
    out = tmp_path / "out"
    for step, state in states.items():
        (out / f"checkpoint-{step}").mkdir(parents=True)
        weights = {**state, "tied": state["weight"].clone()}
        safetensors.torch.save_file(weights, out / f"checkpoint-{step}" / "model.safetensors")
        torch.save(Harm(), out / f"checkpoint-{step}" / "training_args.bin")
    safetensors.torch.save_file({"last": torch.ones(1)}, out / "model.safetensors")
    torch.save(Harm(), out / "training_args.bin")
    (out / "runs").mkdir()
    table = dshistory.import_checkpoint(out, history=tmp_path / "history")
    assert [(row["step"], row["left_out"]) for row in table] == [(step, "training_args.bin") for step in (10, 20, 30)]
    same(stored(sound(tmp_path / "history"), 30)["model"], states[30])


def test_unchanged_tensors_are_not_written_again_and_ties_are_kept(states, tmp_path):
    for step, state in states.items():
        torch.save({"model": state, "global_step": step, "notes": "x"}, tmp_path / f"{step:06d}.pt")
    table = dshistory.import_checkpoint(tmp_path, history=tmp_path / "history")
    assert [row["left_out"] for row in table] == ["global_step, notes"] * 3
    explorer = sound(tmp_path / "history")
    for step, state in states.items():
        same(stored(explorer, step)["model"], state)
    log = {row["step"]: row["bytes"] for row in explorer.sql("SELECT step, bytes FROM checkpoints")}
    extents = explorer.history.extents(explorer.history.resolve(30))
    assert [extent.file for extent in extents if extent.name == "table"] == [
        extents[0].file.replace(f"{30:012d}", f"{10:012d}")
    ]
    assert log.keys() == states.keys()
    assert next(extent for extent in extents if extent.kind == "model" and extent.aliases).aliases == ("tied",)


def test_an_optimizer_is_imported_when_its_parameters_have_names(tmp_path):
    model = Net(8)
    optimizer = torch.optim.AdamW(model.named_parameters())
    one_step(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "step_1.pt")
    dshistory.import_checkpoint(tmp_path / "step_1.pt", history=tmp_path / "history")
    found = stored(sound(tmp_path / "history"), 1)
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        same(found[kind], {name: optimizer.state[p][kind] for name, p in model.named_parameters()})
    for group in state["optimizer"]["param_groups"]:
        del group["param_names"]
    torch.save(state, tmp_path / "step_1.pt")
    table = dshistory.import_checkpoint(tmp_path / "step_1.pt", history=tmp_path / "history")
    assert table[0]["left_out"] == "optimizer (its parameters have no names)"


def test_an_optimizer_without_names_belongs_to_all_parameters_in_order_or_to_nobody_knows_which(tmp_path):
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))
    weights = {"first": first.detach(), "second": second.detach()}
    left_out = []
    for step, groups in enumerate([[first, second], [{"params": [second]}, {"params": [first]}]]):
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        (first * 2 + second * 5).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / f"step_{step}.pt")
        table = dshistory.import_checkpoint(tmp_path / f"step_{step}.pt", history=tmp_path / "history")
        left_out.append(table[0]["left_out"])
        if step == 0:
            found = stored(sound(tmp_path / "history"), 0)["momentum_buffer"]
            same(found, {"first": torch.full((3,), 2.0), "second": torch.full((3,), 5.0)})
    assert left_out == [None, "optimizer (its parameters have no names)"]


def test_a_dcp_checkpoint_with_an_optimizer(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = make()
    one_step(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments, "epoch": 3}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    table = dshistory.import_checkpoint(tmp_path, history=tmp_path / "history")
    assert "epoch" in table[0]["left_out"]
    found = stored(sound(tmp_path / "history"), 7)
    same(found["model"], model.state_dict())
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        same(found[kind], {name: optimizer.state[p][kind] for name, p in model.named_parameters()})


class Harm:
    def __reduce__(self):
        return (Path.touch, (Path("harmed"),))


@pytest.mark.parametrize("place", ["file", "legacy", "dcp metadata", "dcp chunk"])
def test_nothing_is_executed(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "step_1.pt"
    if place.startswith("dcp"):
        path = tmp_path / "step_1"
        dcp.save({"a": torch.ones(3)}, checkpoint_id=path, no_dist=True)
        file = path / ".metadata" if place == "dcp metadata" else next(path.glob("*.distcp"))
        file.write_bytes(pickle.dumps(Harm()))
    else:
        torch.save({"a": torch.ones(3), "b": Harm()}, path, _use_new_zipfile_serialization=place == "file")
    with pytest.raises(UnsupportedError, match=r"pathlib\.|getattr|more than data"):
        dshistory.import_checkpoint(path, history=tmp_path / "history")
    assert not (tmp_path / "harmed").exists()
    if place == "file":
        with pytest.raises(UnsupportedError, match=r"step_1\.pt holds more than data: the classes .*pathlib.*Path"):
            dshistory.import_checkpoint(path, history=tmp_path / "history")


def test_unknown_and_repeated_steps_are_refused(tmp_path):
    weights = {"a": torch.ones(3)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    history = tmp_path / "history"
    with pytest.raises(SetupError, match=r"the step of .*model\.safetensors is not known: pass step="):
        dshistory.import_checkpoint(tmp_path / "model.safetensors", history=history)
    dshistory.import_checkpoint(tmp_path / "model.safetensors", history=history, step=5)
    same(stored(sound(history), 5)["model"], weights)
    (tmp_path / "many").mkdir()
    for name in ("step_5.pt", "checkpoint-5.pt"):
        torch.save(weights, tmp_path / "many" / name)
    with pytest.raises(SetupError, match=r"checkpoint-5\.pt and .*step_5\.pt are all of step 5"):
        dshistory.import_checkpoint(tmp_path / "many", history=history)
    with pytest.raises(SetupError, match="step=7 is for one checkpoint, but there are 2"):
        dshistory.import_checkpoint(tmp_path / "many", history=history, step=7)
    assert len(Explorer.open(history).log()) == 1


def test_a_file_that_is_not_a_checkpoint_is_refused_by_name(tmp_path):
    history = tmp_path / "history"
    with pytest.raises(NotFoundError, match="does not exist"):
        dshistory.import_checkpoint(tmp_path / "nowhere", history=history)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="neither it nor anything directly in it"):
        dshistory.import_checkpoint(tmp_path / "empty", history=history)
    with pytest.raises(SetupError, match="no format 'gguf'; the formats are"):
        dshistory.import_checkpoint(tmp_path / "empty", history=history, format="gguf")
    (tmp_path / "step_1.pt").write_bytes(b"nonsense")
    with pytest.raises((FormatError, UnsupportedError), match=r"step_1\.pt"):
        dshistory.import_checkpoint(tmp_path / "step_1.pt", history=history)
    torch.save([1, 2], tmp_path / "step_2.pt")
    with pytest.raises(FormatError, match="holds a list, not a state dict"):
        dshistory.import_checkpoint(tmp_path / "step_2.pt", history=history)
    torch.save({"epoch": 3}, tmp_path / "step_3.pt")
    with pytest.raises(FormatError, match="no tensors under names; its keys are epoch"):
        dshistory.import_checkpoint(tmp_path / "step_3.pt", history=history)
    assert not history.exists()


def test_a_false_safetensors_header_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path = tmp_path / "step_1.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(FormatError, match=r"end at byte 16 of the data, the file has 12"):
        dshistory.import_checkpoint(path, history=tmp_path / "history")
    (tmp_path / "step_2").mkdir()
    index = {"weight_map": {"a": "../step_1.safetensors"}}
    (tmp_path / "step_2" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"field weight_map: '\.\./step_1\.safetensors'"):
        dshistory.import_checkpoint(tmp_path / "step_2", history=tmp_path / "history")


def test_a_flipped_bit_afterwards_is_found(states, tmp_path):
    torch.save(states[10], tmp_path / "step_10.pt")
    dshistory.import_checkpoint(tmp_path / "step_10.pt", history=tmp_path / "history")
    explorer = sound(tmp_path / "history")
    flip_bit(next((tmp_path / "history").rglob("*.safetensors")), offset=5000)
    assert len(explorer.verify(quiet=True)) == 1


def test_the_command_line_imports(states, tmp_path, capsys):
    torch.save(states[10], tmp_path / "step_10.pt")
    assert cli.main(["import", str(tmp_path / "step_10.pt"), "--history", str(tmp_path / "h"), "--step", "11"]) == 0
    assert "imported as run" in capsys.readouterr().out
    same(stored(Explorer.open(tmp_path / "h"), 11)["model"], states[10])
