"""A step keeps its own generators, loader position, buffers and schedule, whenever it is captured."""

import warnings

import pytest
import torch
from capture_helpers import assert_same, committed_steps, make, one_step, reference
from torchdata.stateful_dataloader import StatefulDataLoader

import capture
from catalog.errors import SnapshotError
from catalog.history import History


class Counter:
    """The loop changes this user state after the optimizer, as it would a weight average."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        self.updates = state["updates"]


@pytest.mark.guards("A checkpoint holds one step")
def test_a_step_captured_late_is_as_it_was(history):
    """The last step is not due; another forward runs, the loader advances, and numbers are drawn."""
    model, optimizer = make()
    loader = StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True)
    batches = iter(loader)
    session = capture.enable(model, optimizer=optimizer, every=5, history=history, dataloader=loader)
    for _ in range(7):
        next(batches)
        one_step(model, optimizer)
    expected, rng = reference(model, optimizer), torch.get_rng_state()
    following = [batch.tolist() for batch in batches]
    model(torch.randn(8, 64))
    session.close()
    assert_same(capture.restore(7, history=history), expected)

    again, optimizer = make(seed=9)
    loader = StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True)
    capture.restore(7, history=history, model=again, optimizer=optimizer, dataloader=loader)
    assert torch.equal(torch.get_rng_state(), rng)
    assert [batch.tolist() for batch in loader] == following


def test_a_large_buffer_that_changes_late_for_the_first_time_is_reported(history):
    model, optimizer = make()
    model.register_buffer("table", torch.zeros(300_000))
    session = capture.enable(model, optimizer=optimizer, every=5, history=history)
    one_step(model, optimizer)
    model.table.add_(1)
    with pytest.warns(UserWarning, match="step 1 .* captured late: buffers table"):
        session.close()


def test_a_large_buffer_that_is_known_to_change_is_kept(history):
    model, optimizer = make()
    model.register_buffer("table", torch.zeros(300_000))
    session = capture.enable(model, optimizer=optimizer, every=5, history=history)
    for _ in range(3):
        model.table.add_(1)
        one_step(model, optimizer)
    expected = reference(model, optimizer)
    model.table.add_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.close()
    assert_same(capture.restore(3, history=history), expected)


@pytest.mark.parametrize("evaluate", ["no_grad", "eval"])
def test_an_evaluation_before_the_schedulers_step_does_not_end_the_step(history, evaluate):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = {}
    with capture.enable(model, optimizer=optimizer, scheduler=scheduler, every=1, history=history) as session:
        for step in range(1, 5):
            one_step(model, optimizer)
            if evaluate == "eval":
                model.eval()(torch.randn(8, 64))
                model.train()
            else:
                with torch.no_grad():
                    model(torch.randn(8, 64))
            scheduler.step()
            rates[step] = (optimizer.param_groups[0]["lr"], scheduler.last_epoch)
    for step, expected in rates.items():
        capture.restore(f"{session.run}:{step}", history=history, model=model, optimizer=optimizer, scheduler=scheduler)
        assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == expected


def test_a_scheduler_by_epochs_keeps_the_state_of_a_step_captured_late(history):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    session = capture.enable(model, optimizer=optimizer, scheduler=scheduler, every=100, history=history)
    for _ in range(3):
        one_step(model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    scheduler.step()
    session.close()
    capture.restore(3, history=history, model=model, optimizer=optimizer, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == rate
    assert scheduler.last_epoch == 0


def test_a_due_step_at_the_end_of_an_epoch_keeps_its_schedule_when_the_session_is_closed(history):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    session = capture.enable(model, optimizer=optimizer, scheduler=scheduler, every=1, history=history)
    for _ in range(3):
        one_step(model, optimizer)
    scheduler.step()
    session.close()
    capture.restore(3, history=history, model=model, optimizer=optimizer, scheduler=scheduler)
    assert scheduler.last_epoch == 0


def test_waiting_before_the_schedulers_step_does_not_affect_its_known_pace(history):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with capture.enable(model, optimizer=optimizer, scheduler=scheduler, every=1, history=history) as session:
        for step in range(1, 5):
            one_step(model, optimizer)
            if step == 2:
                session.wait()
            scheduler.step()
    for step in (1, 3, 4):
        capture.restore(f"{session.run}:{step}", history=history, model=model, optimizer=optimizer, scheduler=scheduler)
        assert scheduler.last_epoch == step


def test_state_that_the_loop_updates_after_the_optimizer_belongs_to_the_step(history):
    model, optimizer = make()
    average = Counter()
    providers = [capture.Stateful("average", average)]
    with capture.enable(model, optimizer=optimizer, every=1, history=history, providers=providers) as session:
        for _ in range(3):
            one_step(model, optimizer)
            average.updates += 1
    for step in range(1, 4):
        capture.restore(f"{session.run}:{step}", history=history, model=model, optimizer=optimizer, providers=providers)
        assert average.updates == step


def test_a_prediction_of_one_element_is_not_recorded_as_a_loss(history):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture.enable(model, optimizer=optimizer, every=1, history=history):
        model(torch.randn(1, 4)).sub(3).square().sum().backward()
        optimizer.step()
    names = {row["name"] for row in History.open(history).query("SELECT name FROM metrics").to_pylist()}
    assert "step_time_s" in names
    assert "loss" not in names


def late_model(history, **options):
    """Return two steps of a training none of whose steps is due."""
    model, optimizer = make()
    session = capture.enable(model, optimizer=optimizer, every=100, history=history, **options)
    one_step(model, optimizer)
    one_step(model, optimizer)
    return model, optimizer, session


@pytest.mark.guards("A checkpoint holds one step")
def test_weights_that_changed_since_the_last_step_are_not_captured_as_that_step(history):
    model, _, session = late_model(history)
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    with pytest.raises(SnapshotError, match=r"step 2 can't be captured any more: model"):
        session.snapshot()
    with pytest.warns(UserWarning, match=r"the last step .* is not captured: step 2 .* changed since"):
        session.close()
    assert committed_steps(history, session.run) == [0]


def replace_data(model, optimizer):
    model.inner.weight.data = model.inner.weight.data * 2.0


def to_half(model, optimizer):
    model.half()


def copy_into_data(model, optimizer):
    model.inner.weight.data.copy_(torch.ones(64, 64))


def change_moments(model, optimizer):
    optimizer.state[model.inner.weight]["exp_avg"].data.mul_(0.5)


def replace_moments(model, optimizer):
    optimizer.state[model.inner.weight]["exp_avg"] = torch.zeros(64, 64)


def load_optimizer(model, optimizer):
    other, other_optimizer = make(seed=8)
    one_step(other, other_optimizer)
    optimizer.load_state_dict(other_optimizer.state_dict())


def replace_parameter(model, optimizer):
    model.inner.weight = torch.nn.Parameter(torch.ones(64, 64))


EDITS = [replace_data, to_half, copy_into_data, change_moments, replace_moments, load_optimizer, replace_parameter]


@pytest.mark.parametrize(("check", "declared_before"), [("sampled", False), ("sampled", True), ("hash", False)])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_after_the_last_step_is_not_captured_as_that_step(history, edit, declared_before, check):
    """`declared_before`: a declared edit between earlier steps has made the session list all tensors anew."""
    model, optimizer, session = late_model(history, check=check, stats_every=0)
    if declared_before:
        with session.modify():
            pass
        one_step(model, optimizer)
    edit(model, optimizer)
    with pytest.raises(SnapshotError, match=r"step [23] can't be captured any more: .*inner\.weight'.*changed since"):
        session.snapshot()
    with pytest.warns(UserWarning, match=r"the last step .* is not captured: step [23] .* changed since"):
        session.close()
    assert committed_steps(history, session.run) == [0]


@pytest.mark.parametrize("check", ["sampled", "versions", "hash"])
def test_a_declared_edit_after_the_last_step_belongs_to_that_step(history, check):
    model, optimizer, session = late_model(history, check=check)
    with session.modify():
        copy_into_data(model, optimizer)
    expected = reference(model, optimizer)
    session.close()
    assert committed_steps(history, session.run) == [0, 2]
    assert_same(capture.restore(2, history=history), expected)


def test_a_load_after_the_last_step_may_have_written_what_versions_alone_do_not_see(history):
    _, optimizer, session = late_model(history, check="versions")
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match=r"the last step .* is not captured: step 2 .* changed since"):
        session.close()
    assert committed_steps(history, session.run) == [0]


def test_a_step_after_edits_and_loads_is_captured_late_as_it_is(history):
    model, optimizer, session = late_model(history)
    for edit in (replace_data, copy_into_data, replace_moments, load_optimizer):
        with session.modify():
            edit(model, optimizer)
        one_step(model, optimizer)
    expected = reference(model, optimizer)
    with session.modify():
        pass
    session.close()
    assert committed_steps(history, session.run) == [0, 6]
    assert_same(capture.restore(6, history=history), expected)


class Replacing(torch.optim.Optimizer):
    """Gives every weight other memory and every moment another tensor at each update."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                moment = self.state[parameter].get("moment", torch.zeros_like(parameter))
                self.state[parameter]["moment"] = moment * 0.9 + parameter.grad
                parameter.data = parameter.data - group["lr"] * self.state[parameter]["moment"]


def test_a_step_whose_update_replaces_all_memory_is_captured_late_as_it_is(history):
    model, _ = make()
    optimizer = Replacing(model.parameters())
    session = capture.enable(model, optimizer=optimizer, every=100, history=history, stats_every=0)
    for _ in range(4):
        one_step(model, optimizer)
    expected = reference(model, optimizer)
    session.close()
    assert committed_steps(history, session.run) == [0, 4]
    assert_same(capture.restore(4, history=history), expected)


def test_an_edit_that_is_undone_after_the_last_step_leaves_small_tensors_as_they_were(history):
    """All their bytes are compared, so that it is the step that is captured."""
    model, optimizer = make(16)
    session = capture.enable(model, optimizer=optimizer, every=100, history=history, stats_every=0)
    one_step(model, optimizer)
    expected = reference(model, optimizer)
    with torch.no_grad():
        model.inner.weight.add_(1.0).copy_(expected["model"]["inner.weight"])
    session.close()
    assert committed_steps(history, session.run) == [0, 1]
    assert_same(capture.restore(1, history=history), expected)


@pytest.mark.parametrize("check", ["sampled", "versions", "hash"])
def test_one_changed_element_of_a_small_tensor_is_found_after_the_last_step(history, check):
    model, optimizer = make(16)
    session = capture.enable(model, optimizer=optimizer, every=100, history=history, check=check)
    one_step(model, optimizer)
    with torch.no_grad():
        model.inner.weight[7, 3] += 1e-3
    with pytest.warns(UserWarning, match="the last step .* is not captured: .*inner.weight' changed since"):
        session.close()
    assert committed_steps(history, session.run) == [0]


def test_an_embedding_that_a_later_forward_renormalizes_is_not_the_steps_any_more(history):
    model = torch.nn.Embedding(4, 8, max_norm=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    session = capture.enable(model, optimizer=optimizer, every=100, history=history)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    model(torch.arange(4))
    with pytest.warns(UserWarning, match="the last step .* is not captured: .*'weight' changed since"):
        session.close()


def test_half_an_update_of_several_optimizers_does_not_count_as_a_step(history):
    torch.manual_seed(3)
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in model]
    session = capture.enable(model, optimizer=optimizers, every=100, history=history)
    for part, optimizer in [*zip(model, optimizers, strict=True), (model[0], optimizers[0])]:
        part(torch.randn(2, 8)).square().sum().backward()
        optimizer.step()
    with pytest.warns(UserWarning, match="the last step .* is not captured"):
        session.close()
    assert committed_steps(history, session.run) == [0]


def test_an_optimizer_that_calls_its_parents_step_counts_once(history):
    class Decayed(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(0.9)

    model, plain = make()
    optimizer = Decayed(model.parameters(), lr=0.01)
    assert isinstance(plain, torch.optim.AdamW)
    expected = {}
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        for step in range(1, 4):
            one_step(model, optimizer)
            expected[step] = reference(model, optimizer)
    assert committed_steps(history, session.run) == [0, 1, 2, 3]
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history), state)


def test_a_skipped_update_after_the_last_step_leaves_it_unchanged(history):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    session = capture.enable(model, optimizer=optimizer, scaler=scaler, every=100, history=history)

    def turn(factor: float) -> None:
        scaler.scale(model(torch.randn(8, 64)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(3):
        turn(1.0)
    expected = scaler.state_dict()
    turn(float("inf"))
    assert scaler.state_dict() != expected
    session.close()
    capture.restore(3, history=history, model=model, optimizer=optimizer, scaler=scaler)
    assert scaler.state_dict() == expected


@pytest.mark.parametrize("every", [1, 100])
def test_a_skipped_update_moves_buffers_but_not_those_of_the_step_before(history, every):
    """The resumed loop gets the skipped batch again, so its statistics must not be in the step already."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    session = capture.enable(model, optimizer=optimizer, scaler=scaler, every=every, history=history, stats_every=0)

    def turn(seed: int) -> None:
        torch.manual_seed(seed)
        factor = float("inf") if seed == 3 else 1.0
        scaler.scale(model(torch.randn(8, 64)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    turn(1)
    turn(2)
    expected = reference(model, optimizer)
    turn(3)
    assert not torch.equal(model.norm.running_mean, expected["buffer"]["norm.running_mean"])
    session.close()
    turn(4)
    last = reference(model, optimizer)

    assert_same(capture.restore(f"{session.run}:2", history=history), expected)
    capture.restore(f"{session.run}:2", history=history, model=model, optimizer=optimizer, scaler=scaler)
    turn(3)
    turn(4)
    assert_same(reference(model, optimizer), last)


def test_a_chained_schedule_by_epochs_keeps_the_steps_own_state(history):
    model, optimizer = make()
    parts = [torch.optim.lr_scheduler.ExponentialLR(optimizer, rate) for rate in (0.5, 0.9)]
    scheduler = torch.optim.lr_scheduler.ChainedScheduler(parts, optimizer)
    session = capture.enable(model, optimizer=optimizer, scheduler=scheduler, every=1, history=history)
    for _ in range(3):
        one_step(model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    scheduler.step()
    session.close()
    capture.restore(3, history=history, model=model, optimizer=optimizer, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == rate


def test_the_pace_of_a_schedule_is_known_after_a_restore(history):
    """The first update after the restore is the last one of an epoch."""

    def epoch_of(model, optimizer, scheduler, updates: int) -> None:
        for _ in range(updates):
            one_step(model, optimizer)
        scheduler.step()

    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with capture.enable(model, optimizer=optimizer, scheduler=scheduler, every=1, history=history):
        epoch_of(model, optimizer, scheduler, 4)
    again, other = make(seed=9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    capture.restore(3, history=history, model=again, optimizer=other, scheduler=schedule)
    with capture.enable(again, optimizer=other, scheduler=schedule, every=1, history=history) as session:
        epoch_of(again, other, schedule, 1)
        one_step(again, other)
    capture.restore(f"{session.run}:4", history=history, model=again, optimizer=other, scheduler=schedule)
    assert schedule.last_epoch == 0


def test_extra_state_of_a_step_captured_late(history):
    class Counting(torch.nn.Linear):
        seen = 0

        def forward(self, x):
            self.seen += 1
            return super().forward(x)

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = torch.nn.Sequential(Counting(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture.enable(model, optimizer=optimizer, every=100, history=history):
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        model(torch.randn(2, 4))
    capture.restore(3, history=history, model=model, optimizer=optimizer)
    assert model[0].seen == 3
