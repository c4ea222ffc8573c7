"""A folder of Hugging Face's Trainer becomes a history with all that is data in it, and a Trainer goes on from that.

That a Trainer goes on from a history that HistoryCallback has captured is tested on two ranks, in
`tests/multi_rank/frameworks/frameworks_cases_huggingface.py` and, with DeepSpeed, `deepspeed_cases_trainer.py`.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import capture.huggingface
import dshistory
from capture.replays.change import Change
from capture.replays.request import VARIABLE, ReplayRequest
from catalog.errors import FormatError, SetupError
from catalog.records import CheckpointRef
from dshistory.commands import cli

pytestmark = pytest.mark.slow


class Recorder(TrainerCallback):
    """Callback that keeps the weights after every step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args, state, control, *, model, **_) -> None:
        self.weights[state.global_step] = {name: one.detach().clone() for name, one in model.named_parameters()}


class Harm:
    """An object whose unpickling creates a file."""

    def __reduce__(self):
        return Path.touch, (Path("harmed"),)


def model(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=9, vocab_size=29, eos_token_id=0))


def trainer(folder: Path, *callbacks: TrainerCallback, seed: int) -> Trainer:
    """Return a Trainer with shuffled data and dropout, whose evaluations draw random numbers."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=6,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    rows = [torch.randint(0, 29, (9,), generator=torch.Generator().manual_seed(index)) for index in range(8)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(
        model=model(seed), args=arguments, train_dataset=data, eval_dataset=data[:2], callbacks=list(callbacks)
    )


def test_a_trainer_is_not_replayed_by_its_script(tmp_path, monkeypatch) -> None:
    ref = CheckpointRef("20260101-000000-abcdef", 2)
    asked = ReplayRequest(id="x", history=tmp_path / "h", ref=ref, until=4, change=Change())
    monkeypatch.setenv(VARIABLE, asked.to_environment())
    callback = capture.huggingface.HistoryCallback(every=2, history=tmp_path / "h")
    with pytest.raises(SetupError, match=r"20260101-000000-abcdef:2: write dshistory.resume_folder"):
        trainer(tmp_path, callback, seed=0).train()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict[int, dict[str, torch.Tensor]]]:
    """Return the output folder of a training that saved every second step, and the weights after each step."""
    folder, recorder = tmp_path_factory.mktemp("trained") / "out", Recorder()
    made = trainer(folder, recorder, seed=1)
    made.train()
    made.save_state()
    return folder, recorder.weights


@pytest.fixture
def checkpoint(trained, tmp_path) -> Path:
    """Return a copy of the checkpoint of step 4, to be changed."""
    return Path(shutil.copytree(trained[0] / "checkpoint-4", tmp_path / "checkpoint-4"))


def test_all_that_is_data_is_imported_and_the_rest_is_named(trained, tmp_path):
    folder, weights = trained
    table = dshistory.import_checkpoint(folder, history=tmp_path / "history")
    assert [row["step"] for row in table] == [2, 4, 6]
    assert {row["left_out"] for row in table} == {"config.json, generation_config.json, training_args.bin"}
    explorer = dshistory.Explorer.open(tmp_path / "history")
    assert not len(explorer.verify(quiet=True))
    log = json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    rows = {(row["name"], row["step"]): row["value"] for row in explorer.sql("SELECT name, step, value FROM metrics")}
    for entry in log:
        for name, value in entry.items():
            names = {"loss": ("loss", "trainer_loss"), "learning_rate": ("lr", "learning_rate"), "step": ()}
            for one in names.get(name, (name,)):
                assert rows[one, entry["step"]] == value
    stored = explorer.restore(4)
    for name, tensor in weights[4].items():
        assert torch.equal(stored["model"][name], tensor)
    assert torch.equal(stored["model"]["lm_head.weight"], stored["model"]["transformer.wte.weight"])


def test_the_optimizers_state_belongs_to_its_parameters(trained, tmp_path):
    """A live model, optimizer and scheduler that are restored have the state that the Trainer saved."""
    folder = trained[0]
    dshistory.import_checkpoint(folder / "checkpoint-4", history=tmp_path / "history")
    made = trainer(tmp_path / "other", seed=2)
    made.create_optimizer_and_scheduler(6)
    capture.restore(
        4, history=tmp_path / "history", model=made.model, optimizer=made.optimizer, scheduler=made.lr_scheduler
    )
    saved = torch.load(folder / "checkpoint-4" / "optimizer.pt")
    found = made.optimizer.state_dict()
    assert found["param_groups"] == saved["param_groups"]
    assert found["state"].keys() == saved["state"].keys()
    for number, state in saved["state"].items():
        for key, value in state.items():
            assert torch.equal(found["state"][number][key], value), (number, key)
    assert made.lr_scheduler.state_dict() == torch.load(folder / "checkpoint-4" / "scheduler.pt")
    assert torch.equal(
        torch.get_rng_state(), torch.load(folder / "checkpoint-4" / "rng_state.pth", weights_only=False)["cpu"]
    )


def test_a_trainer_goes_on_from_an_imported_folder(trained, tmp_path, capsys):
    folder, weights = trained
    dshistory.import_checkpoint(folder, history=tmp_path / "history")
    explorer, recorder, path = dshistory.Explorer.open(tmp_path / "history"), Recorder(), str(tmp_path / "checkpoint-4")
    assert cli.main(["resume_folder", str(tmp_path / "history"), "4", path]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    with pytest.raises(SetupError, match=r"resume_folder to .*checkpoint-4: it exists; name another place"):
        explorer.resume_folder(4, path)
    made = trainer(tmp_path / "other", recorder, seed=2)
    made.train(resume_from_checkpoint=path)
    assert set(recorder.weights) == {5, 6}
    for step in (5, 6):
        for name, tensor in weights[step].items():
            assert torch.equal(recorder.weights[step][name], tensor), (step, name)


def test_an_optimizer_whose_parameters_are_not_known_is_left_out_with_the_reason(checkpoint, tmp_path):
    def left_out() -> str:
        table = dshistory.import_checkpoint(checkpoint, history=tmp_path / "history")
        return str(table[0]["left_out"])

    saved = torch.load(checkpoint / "optimizer.pt")
    frozen = {**saved, "param_groups": [{**saved["param_groups"][0], "params": [0, 1]}, saved["param_groups"][1]]}
    torch.save(frozen, checkpoint / "optimizer.pt")
    assert (
        "optimizer.pt (its groups have 2 and 18 parameters, those of a Trainer for this model 10 and 18)" in left_out()
    )
    state = {**saved["state"], 3: {key: torch.zeros(3) for key in saved["state"][3]}}
    torch.save({**saved, "state": state}, checkpoint / "optimizer.pt")
    assert (
        "optimizer.pt (none of its state 3 has the shape [16, 16] of transformer.h.0.attn.c_proj.weight" in left_out()
    )
    config = json.loads((checkpoint / "config.json").read_text())
    for change, reason in [
        ({"architectures": ["Mine"]}, "transformers has no model 'Mine'"),
        ({"n_layer": 10**9}, "config.json has 1000000000 layers, the weights only 28 tensors"),
        ({"n_head": 5}, "no model can be made of config.json"),
    ]:
        (checkpoint / "config.json").write_text(json.dumps({**config, **change}))
        assert reason in left_out()
    (checkpoint / "config.json").unlink()
    assert "optimizer.pt (no config.json says the order of its parameters)" in left_out()


def test_nothing_in_it_is_executed_and_damage_is_named(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rng_state.pth", "scheduler.pt", "optimizer.pt"):
        sound = (checkpoint / name).read_bytes()
        torch.save({"python": Harm()}, checkpoint / name)
        table = dshistory.import_checkpoint(checkpoint, history=tmp_path / "history")
        assert re.search(rf"{name} \(\S*{name} holds more than data: the classes .*pathlib", table[0]["left_out"])
        (checkpoint / name).write_bytes(sound)
    torch.save({"python": 1}, checkpoint / "rng_state.pth")
    with pytest.raises(FormatError, match=r"rng_state\.pth has no states under 'python', 'numpy' and 'cpu'"):
        dshistory.import_checkpoint(checkpoint, history=tmp_path / "history")
    (checkpoint / "trainer_state.json").write_text("[1")
    with pytest.raises(FormatError, match=r"trainer_state\.json can't be read as JSON"):
        dshistory.import_checkpoint(checkpoint, history=tmp_path / "history")
    assert not (tmp_path / "harmed").exists()
