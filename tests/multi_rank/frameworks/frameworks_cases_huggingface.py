"""Cases for Hugging Face's Trainer and Accelerate on two ranks: captured, restored, trained on to the same bits."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.optimizer import AcceleratedOptimizer
from capture_helpers import assert_same
from faulty_writer import faults_in_new_writers
from frameworks_helpers import (
    Training,
    all_closed,
    average_gradients,
    batch,
    enabled,
    plain,
    rank,
    restored,
    whole_state,
)
from ranks import covers
from torch.utils.data import SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import capture
import native
from capture.huggingface import HistoryCallback
from catalog.errors import SetupError, UnsupportedError
from catalog.history import History
from dshistory import Explorer

STEPS, PER_STEP = 6, 8
"""The number of updates of a training, and of the examples that both ranks together use for one."""


class Sequential(Trainer):
    """Trainer that takes batches in the order of the data set."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Recorder(TrainerCallback):
    """Callback that keeps a copy of all state after every step."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}

    def on_step_end(self, args, state, control, *, model, optimizer, **_: Any) -> None:
        self.states[state.global_step] = whole_state(model, optimizer.optimizer)


class Restorer(TrainerCallback):
    """Callback that restores a step once the first batch exists, because the loader draws random numbers before it."""

    def __init__(self, step: int, history: Path) -> None:
        self.step, self.history = step, history

    def on_step_begin(self, args, state, control, *, model, optimizer, lr_scheduler, **_: Any) -> None:
        if state.global_step == 0:
            capture.restore(self.step, history=self.history, model=model, optimizer=optimizer, scheduler=lr_scheduler)
            state.global_step = self.step


def trainer(folder: Path, *callbacks: TrainerCallback, seed: int, after: int = 0, **options: Any) -> Trainer:
    """Return a Trainer of a tiny GPT-2 with dropout, whose data begins after step `after`."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=9, vocab_size=29))
    settings = {
        "max_steps": STEPS,
        "save_strategy": "no",
        "logging_steps": 1,
        "gradient_accumulation_steps": 2,
        **options,
    }
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        seed=seed,
        learning_rate=5e-3,
        **settings,
    )
    found = [example(index) for index in range(after * PER_STEP, (STEPS + 4) * PER_STEP)]
    return Sequential(
        model=model, args=arguments, train_dataset=found, eval_dataset=found[:4], callbacks=list(callbacks)
    )


def example(index: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 29, (9,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens, "labels": tokens}


def history_callback(history: Path, **options: Any) -> HistoryCallback:
    return HistoryCallback(history=history, **{"every": 2, "backend": "posix", "budget_bytes": 16 << 20, **options})


def committed(history: Path, run: str) -> list[int]:
    return [ref.step for ref in History.open(history).checkpoints(run)]


@covers("Hugging Face's `Trainer` with `HistoryCallback`")
def case_trainer(folder: Path) -> None:
    first, callback = Recorder(), history_callback(folder / "trained")
    trainer(folder, callback, first, seed=1).train()
    callback.session.wait()
    all_closed()
    assert committed(folder / "trained", callback.session.run) == [0, 2, 4, 6]
    stored = capture.restore(4, history=folder / "trained")
    assert_same(
        {"model": {n: stored["model"][n] for n in first.states[4]["model"]}}, {"model": first.states[4]["model"]}
    )
    second = Recorder()
    trainer(folder, Restorer(4, folder / "trained"), second, seed=2, after=4).train()
    assert set(second.states) == {5, 6}
    for step in (5, 6):
        assert_same(second.states[step], first.states[step])


def case_trainer_metrics_are_in_the_log(folder: Path) -> None:
    if rank() == 0:
        rows = Explorer.open(folder / "trained").sql("SELECT name, step FROM metrics")
        found = set(zip(rows["name"].to_pylist(), rows["step"].to_pylist(), strict=True))
        names = ("loss", "lr", "trainer_loss", "grad_norm", "learning_rate")
        assert {(name, step) for name in names for step in range(1, STEPS + 1)} <= found


def case_the_best_model_is_not_taken_for_the_last_step(folder: Path) -> None:
    recorder, callback = Recorder(), history_callback(folder / "best", every=4)
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer(folder, callback, recorder, seed=1, load_best_model_at_end=True, **options).train()
    all_closed()
    stored = capture.restore(STEPS, history=folder / "best")["model"]
    assert_same({"model": {n: stored[n] for n in recorder.states[6]["model"]}}, {"model": recorder.states[6]["model"]})


def case_its_own_checkpoint_makes_a_child(folder: Path) -> None:
    """The Trainer's checkpoint is of the run in `best`; in another history the training is nobody's child."""
    before = History.open(folder / "best").current_run()
    for name, parent in (("best", (before, 4)), ("numbers", (None, None))):
        callback = history_callback(folder / name, every=1)
        resumed = trainer(folder, callback, seed=1, save_strategy="steps", save_steps=2)
        resumed.train(resume_from_checkpoint=str(folder / "trainer" / "checkpoint-4"))
        all_closed()
        assert committed(folder / name, callback.session.run) == [4, 5, 6]
        facts = History.open(folder / name).run_facts(callback.session.run)
        assert (facts.parent_run, facts.parent_step) == parent


@covers("Hugging Face's `Trainer` resumed from a folder of `dshistory.resume_folder`")
def case_a_trainer_goes_on_from_a_history(folder: Path) -> None:
    """An evaluation after the step draws random numbers, which dropout of the next step depends on."""
    first, callback = Recorder(), history_callback(folder / "resumed")
    options = {"eval_strategy": "steps", "eval_steps": 2}
    was = trainer(folder, callback, first, seed=1, **options)
    was.train()
    all_closed()
    path = folder / "checkpoint-4"
    if rank() == 0:
        assert Explorer.open(folder / "resumed").resume_folder(4, path) == str(path)
    dist.barrier()
    second, child = Recorder(), history_callback(folder / "resumed")
    goes_on = trainer(folder, child, second, seed=2, **options)
    goes_on.train(resume_from_checkpoint=str(path))
    all_closed()
    assert set(second.states) == {5, 6}
    for step in (5, 6):
        assert_same(second.states[step], first.states[step])
    facts = History.open(folder / "resumed").run_facts(child.session.run)
    assert (facts.parent_run, facts.parent_step) == (callback.session.run, 4)
    logs = [
        [
            {name: value for name, value in entry.items() if "runtime" not in name and "second" not in name}
            for entry in of
        ]
        for of in (goes_on.state.log_history[:-1], was.state.log_history[:-1])
    ]
    assert logs[0] == logs[1]


def case_a_history_without_a_trainer_is_refused(folder: Path) -> None:
    _, training, _ = accelerated(1)
    enabled(training, folder / "alone").close()
    all_closed()
    if rank() == 0:
        with pytest.raises(UnsupportedError, match=r"was not captured by capture\.huggingface\.HistoryCallback"):
            Explorer.open(folder / "alone").resume_folder(0, folder / "refused-folder")
        assert not (folder / "refused-folder").exists()
    dist.barrier()


def case_an_exception_leaves_what_was_captured(folder: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **_: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("the training fails")

    callback = history_callback(folder / "failed")
    failing = trainer(folder, callback, Fails(), seed=1)
    with pytest.raises(RuntimeError, match="the training fails"):
        failing.train()
    run = callback.session.run
    failing.callback_handler.remove_callback(Fails)
    failing.train()
    all_closed()
    assert {0, 2} <= set(committed(folder / "failed", run))
    assert callback.session.run != run
    assert committed(folder / "failed", callback.session.run) == [0, 2, 4, 6]


def case_an_evaluation_on_its_own_is_not_recorded(folder: Path) -> None:
    callback = history_callback(folder / "evaluated")
    run = trainer(folder, callback, seed=1)
    run.evaluate()
    run.train()
    run.evaluate()
    all_closed()
    names = Explorer.open(folder / "evaluated").sql("SELECT DISTINCT name FROM metrics")["name"].to_pylist()
    assert "trainer_loss" in names
    assert "eval_loss" not in names


def case_a_disk_that_fails_does_not_end_the_training(folder: Path) -> None:
    callback = history_callback(folder / "broken", every=1)
    run = trainer(folder, callback, seed=1)
    with warnings.catch_warnings(record=True) as said, faults_in_new_writers(native.Faults(fail_after=3)):
        warnings.simplefilter("always")
        run.train()
    assert run.state.global_step == STEPS
    assert any("Input/output error" in str(one.message) for one in said), [str(one.message) for one in said]


def case_what_the_callback_refuses(folder: Path) -> None:
    with pytest.raises(SetupError, match="resume_from_checkpoint"):
        HistoryCallback(resume="auto")
    with pytest.raises(SetupError, match="leave optimizer= out"):
        HistoryCallback(optimizer=None)
    with pytest.raises(SetupError, match="no session yet"):
        _ = HistoryCallback().session
    with pytest.raises(SetupError, match="every=0"):
        trainer(folder, history_callback(folder / "never", every=0), seed=1).train()


def accelerated(seed: int, *, stateful: bool = False) -> tuple[Accelerator, Training, Any]:
    configuration = DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=True, data_seed=3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=configuration)
    model, optimizer, scheduler = plain(seed)
    data = [batch(index)[0] for index in range(64)]
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=stateful)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    return accelerator, (model, optimizer, scheduler), loader


def go(
    accelerator: Accelerator, training: Training, batches: Any, after: Callable[[], None] = lambda: None
) -> list[float]:
    """Train; return the loss of every micro-batch. `after` is called after each one."""
    model, optimizer, scheduler = training
    losses = []
    for tokens in batches:
        with accelerator.accumulate(model):
            loss = model(tokens)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        after()
    return losses


@covers("Accelerate")
def case_accelerate(folder: Path) -> None:
    accelerator, training, _ = accelerated(1)
    with enabled(training, folder / "accelerated") as session:
        losses = go(accelerator, training, map(batch, range(8)))
        session.wait()
    assert committed(folder / "accelerated", session.run) == [0, 1, 2, 3, 4]
    final = whole_state(training[0], training[1].optimizer)
    accelerator, other, _ = accelerated(2)
    restored(other, 2, folder / "accelerated")
    assert go(accelerator, other, map(batch, range(4, 8))) == losses[4:]
    assert_same(whole_state(other[0], other[1].optimizer), final)
    bare = restored(plain(3), 4, folder / "accelerated")
    assert_same(whole_state(bare[0], bare[1]), final)


@covers("Accelerate: the data loader goes on at the next batch")
def case_accelerate_resumes_at_the_next_batch(folder: Path) -> None:
    accelerator, training, loader = accelerated(1, stateful=True)
    with enabled(training, folder / "loader", dataloader=loader):
        losses = go(accelerator, training, loader)
    all_closed()
    accelerator, other, loader = accelerated(2, stateful=True)
    model, optimizer, scheduler = other
    capture.restore(
        3, history=folder / "loader", model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader
    )
    assert go(accelerator, other, loader) == losses[6:]


@covers("Accelerate: the gradient scaler")
def case_the_scaler_of_accelerate_is_captured(folder: Path) -> None:
    accelerated(1)

    def scaled(seed: int, scale: float) -> tuple[Training, torch.amp.GradScaler]:
        model, optimizer, scheduler = plain(seed)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        return (model, AcceleratedOptimizer(optimizer, scaler=scaler), scheduler), scaler

    (model, optimizer, scheduler), scaler = scaled(1, 8.0)
    with enabled((model, optimizer, scheduler), folder / "scaled"):
        for index in range(3):
            scaler.scale(model(batch(index))).backward()
            average_gradients(model)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scaler.state_dict()["scale"] == 16.0
    other, restored_scaler = scaled(2, 2.0)
    restored(other, 3, folder / "scaled")
    assert restored_scaler.state_dict() == scaler.state_dict()


def case_a_loader_that_can_not_tell_its_position(folder: Path) -> None:
    _, training, loader = accelerated(1)
    with pytest.raises(UnsupportedError, match="no state_dict"):
        enabled(training, folder / "refused", dataloader=loader)
