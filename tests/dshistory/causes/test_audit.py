"""The audit recovers what an update really did, names what does not follow from it, and is silent otherwise."""

import math
import re

import pytest
import torch
from safetensors.torch import save_file

import capture
import dshistory
from catalog.errors import NotFoundError, SetupError

STEPS = 5
PLANTED = 4
"""Something is done before the update of this step."""


def net(dtype=torch.float32):
    torch.manual_seed(0)
    embedding = [torch.nn.Embedding(50, 16), torch.nn.Flatten()]
    return torch.nn.Sequential(
        *embedding, torch.nn.Linear(64, 24), torch.nn.LayerNorm(24), torch.nn.GELU(), torch.nn.Linear(24, 8)
    ).to(dtype)


def two_groups(model, **options):
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, **options)


def train(history, model, optimizer, *, plant=None, every=1, scheduled=True):
    """Capture a training; return the explorer and, by step, the norm of every gradient that the update consumed."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50) if scheduled else None
    gradients = {}
    with capture.enable(
        model, optimizer=optimizer, scheduler=scheduler, every=every, history=history, stats_every=0
    ) as session:
        for step in range(1, STEPS + 1):
            if plant is not None and step == PLANTED:
                # What is done before the forward would belong to the step before.
                model(torch.zeros(1, 4, dtype=torch.long))
                plant(model, optimizer, session)
            loss = (model(torch.randint(0, 50, (16, 4))) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            gradients[step] = {
                name: float(parameter.grad.double().norm())
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return dshistory.open(history), gradients


def causes(explorer, step):
    """Return {name: cause} of the update that led to a step."""
    return named(explorer.audit(step - 1, step, quiet=True))


def named(table):
    return {row["name"]: row["cause"] for row in table.unbalanced}


OPTIMIZERS = {
    "AdamW": two_groups,
    "AdamW, fused": lambda model: two_groups(model, fused=True),
    "AdamW, a loop": lambda model: two_groups(model, foreach=False),
    "AdamW, amsgrad": lambda model: two_groups(model, amsgrad=True),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1),
    "Adam, maximize": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, maximize=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1),
    "SGD, nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "SGD, dampening": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, dampening=0.5),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_healthy_training_balances_and_its_gradients_are_recovered(history, optimizer):
    model = net()
    explorer, gradients = train(history, model, made := OPTIMIZERS[optimizer](model))
    for step in range(2, STEPS + 1):
        table = explorer.audit(step - 1, step, quiet=True)
        assert len(table) == 7
        assert named(table) == {}
        for row in table:
            assert row["updates"] == 1
            assert row["learning_rate"] == pytest.approx(row["group_learning_rate"], rel=1e-3)
            if not made.defaults["maximize"]:
                assert row["gradient_norm"] == pytest.approx(gradients[step][row["name"]], rel=1e-4)
            if "AdamW" in optimizer and row["name"].endswith("0.weight"):
                assert row["decay"] == pytest.approx(0.1 * row["group_learning_rate"], rel=0.02)


def test_what_low_precision_rounds_away_is_no_cause(history):
    explorer, _ = train(history, model := net(torch.bfloat16), two_groups(model))
    assert [causes(explorer, step) for step in range(2, STEPS + 1)] == [{}] * (STEPS - 1)


def _edit(model, optimizer, session):
    with session.modify(), torch.no_grad():
        model[2].weight[3, 3] += 1e-3


def _rate(model, optimizer, session):
    group = optimizer.param_groups[1]

    def raised(*_):
        group["lr"] *= 4

    def lowered(*_):
        group["lr"] /= 4
        for handle in handles:
            handle.remove()

    handles = [optimizer.register_step_pre_hook(raised), optimizer.register_step_post_hook(lowered)]


def _decay(model, optimizer, session):
    def decay(*_):
        handle.remove()
        with torch.no_grad():
            model[0].weight.mul_(0.98)

    handle = optimizer.register_step_pre_hook(decay)


def _double(model, optimizer, session):
    with session.modify(), torch.no_grad():
        model[3].weight.mul_(2)


def _halve_second(model, optimizer, session):
    with session.modify(), torch.no_grad():
        optimizer.state[model[5].weight]["exp_avg_sq"].mul_(0.5)


def _forget_first(model, optimizer, session):
    with session.modify(), torch.no_grad():
        optimizer.state[model[5].weight]["exp_avg"].zero_()


def _swap(model, optimizer, session):
    state = optimizer.state
    state[model[3].weight], state[model[3].bias] = state[model[3].bias], state[model[3].weight]


def _reset(model, optimizer, session):
    optimizer.state.clear()


def _break(model, optimizer, session):
    model[5].bias.register_hook(lambda gradient: gradient * math.nan)


NORMS = {"3.weight", "3.bias"}
VECTORS = NORMS | {"2.bias", "5.bias"}
ALL = VECTORS | {"0.weight", "2.weight", "5.weight"}


@pytest.mark.parametrize(
    ("plant", "names", "words"),
    [
        (_edit, {"2.weight"}, "changed beside the update"),
        (_rate, VECTORS, r"learning rate of the update x4, 0.004 \(the group says 0.001\)"),
        (_decay, {"0.weight"}, r"decays by 0.02 of itself in the update \(the group says 0.0001\)"),
        (_double, {"3.weight"}, r"grows by 1 of itself beside the update \(the group says 0\)"),
        (_halve_second, {"5.weight"}, "second moment fell faster than beta2 allows"),
        (_forget_first, {"5.weight"}, "second moment does not agree with the first"),
        (_swap, NORMS, "second moment"),
        (_reset, ALL, "optimizer state reset: it counted 3 updates before and 1 after"),
        (_break, ALL, "the gradient was not finite"),
    ],
)
def test_what_was_done_is_named_with_its_step_and_tensors(history, plant, names, words):
    model = net()
    explorer, _ = train(history, model, two_groups(model), plant=plant, scheduled=False)
    assert [causes(explorer, step) for step in range(2, PLANTED)] == [{}] * (PLANTED - 2)
    found = causes(explorer, PLANTED)
    assert found.keys() == names
    for cause in found.values():
        assert re.search(words, cause)


def test_a_rate_that_is_set_right_before_the_update_is_no_cause(history):
    def shrink(*_):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    model = net()
    optimizer = two_groups(model)
    optimizer.register_step_pre_hook(shrink)
    explorer, _ = train(history, model, optimizer, scheduled=False)
    assert [causes(explorer, step) for step in range(2, STEPS + 1)] == [{}] * (STEPS - 1)


class Adam(torch.optim.SGD):
    """Has the name of another optimizer, and its own rule."""


def test_an_optimizer_whose_rule_is_not_known_is_not_judged(history, tmp_path):
    for number, make in enumerate((Adam, torch.optim.Adafactor, torch.optim.RMSprop)):
        model = net()
        explorer, _ = train(tmp_path / str(number), model, make(model.parameters(), lr=1e-3))
        table = explorer.audit(quiet=True)
        assert len(table.unbalanced) == 0
        assert f"without a movement that can be checked: 7 ({make.__name__})" in table.note


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_no_precision_gives_false_alarms(history, dtype):
    model = net(dtype)
    model.register_parameter("scale", torch.nn.Parameter(torch.ones((), dtype=dtype)))
    explorer, _ = train(history, model, two_groups(model, eps=1e-4))
    assert [causes(explorer, step) for step in range(2, STEPS + 1)] == [{}] * (STEPS - 1)


@pytest.mark.parametrize(
    ("plant", "names", "words"),
    [
        ("rate", {"2.bias", "3.weight", "3.bias", "5.bias"}, "learning rate of the update"),
        ("moment", {"5.weight"}, "second moment"),
        ("edit", {"2.weight"}, "changed beside the update"),
    ],
)
def test_float16_itself_is_judged(history, plant, names, words):
    def edit(model, optimizer, session):
        with session.modify(), torch.no_grad():
            model[2].weight[3, 3] += 1

    plants = {"rate": _rate, "moment": _halve_second, "edit": edit}
    model = net(torch.float16)
    optimizer = two_groups(model, eps=1e-4)
    optimizer.param_groups[1]["lr"] = 1e-2
    explorer, _ = train(history, model, optimizer, plant=plants[plant], scheduled=False)
    assert [causes(explorer, step) for step in range(2, PLANTED)] == [{}] * (PLANTED - 2)
    found = causes(explorer, PLANTED)
    assert found
    assert found.keys() <= names, "what float16 rounds away hides the others"
    assert all(words in cause for cause in found.values())


def test_a_scaled_loss_is_unscaled_before_the_books_see_it_and_a_skipped_step_is_no_cause(history):
    model = net()
    optimizer, scaler = two_groups(model), torch.amp.GradScaler("cpu", init_scale=2.0**28, growth_interval=2)
    norms, steps = {}, 0
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0):
        for _ in range(24):
            with torch.autocast("cpu", torch.float16):
                loss = (model(torch.randint(0, 50, (16, 4))) - 1).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            finite = all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
            steps += finite
            norms[steps] = float(model[5].weight.grad.norm()) if finite else norms.get(steps)
            scaler.step(optimizer)
            scaler.update()
    explorer = dshistory.open(history)
    assert 4 < steps < 24
    assert explorer.history.resolve("latest").step == steps, "a skipped update is no step of a plain loop"
    for step in range(2, steps + 1):
        table = explorer.audit(step - 1, step, quiet=True)
        assert named(table) == {}
        norm = next(row["gradient_norm"] for row in table if row["name"] == "5.weight")
        assert norm == pytest.approx(norms[step], rel=1e-4)


def test_a_parameter_that_sgd_leaves_alone_is_no_cause(history):
    def freeze(model, optimizer, session):
        model[2].requires_grad_(False)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    explorer, _ = train(history, model, optimizer, plant=freeze)
    assert [causes(explorer, step) for step in range(2, STEPS + 1)] == [{}] * (STEPS - 1)


def test_over_several_updates_counts_and_second_moments_are_checked(history):
    model = net()
    explorer, _ = train(history, model, two_groups(model), plant=_halve_second, every=2)
    table = explorer.audit(2, 4, quiet=True)
    assert [row["name"] for row in table.unbalanced] == ["5.weight"]
    assert table[0]["updates"] == 2
    assert table[0]["learning_rate"] is None
    assert "capture every step to see more" in table.note


def test_a_parameter_without_a_gradient_is_left_alone_but_not_if_it_moved(history):
    def freeze(model, optimizer, session):
        model[0].weight.requires_grad_(False)
        model[2].bias.requires_grad_(False)
        with session.modify(), torch.no_grad():
            model[2].bias.add_(1)

    model = net()
    explorer, _ = train(history, model, two_groups(model), plant=freeze)
    assert causes(explorer, PLANTED) == {"2.bias": "changed without an update"}
    rows = {row["name"]: row for row in explorer.audit(PLANTED - 1, PLANTED, quiet=True)}
    assert rows["0.weight"]["updates"] == 0


def test_audits_of_a_whole_run_are_kept_as_a_table_and_go_on_where_they_stopped(history):
    model = net()
    explorer, gradients = train(history, model, two_groups(model), plant=_edit)
    assert explorer.sql("SELECT * FROM audit").to_arrow().num_rows == 0
    table = explorer.audit_all(quiet=True)
    assert [row["step"] for row in table] == list(range(1, STEPS + 1))
    assert [row["unbalanced"] for row in table] == [0] * (PLANTED - 1) + [1] + [0] * (STEPS - PLANTED)
    assert table[PLANTED - 1]["worst"] == "2.weight"
    total = math.hypot(*gradients[2].values())
    assert table[1]["gradient_norm"] == pytest.approx(total, rel=1e-4)
    rows = list(explorer.sql("SELECT * FROM audit WHERE step > 1 ORDER BY step, name"))
    assert {row["since"] for row in rows} == set(range(1, STEPS))
    for row in rows:
        assert row["gradient_norm"] == pytest.approx(gradients[row["step"]][row["name"]], rel=1e-4)
    alone = {row["name"]: dict(row) for row in explorer.audit(2, 3, quiet=True)}
    stored = [row for row in rows if row["step"] == 3]
    assert all(alone[row["name"]].items() <= row.items() for row in stored)

    folder = next(history.glob("runs/*/audits"))
    (folder / f"{3:012d}-since-{2:012d}.parquet").unlink()
    explorer.reindex()
    assert explorer.sql("SELECT count(DISTINCT step) AS n FROM audit")[0]["n"] == STEPS - 1
    assert explorer.audit_all(quiet=True).note.endswith("1 audited now")
    assert explorer.audit_all(quiet=True).note.endswith("0 audited now")
    first = folder / f"{1:012d}-since-{0:012d}.parquet"
    damaged = bytearray(first.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    first.write_bytes(damaged)
    assert [problem["file"].endswith(f"audits/{first.name}") for problem in explorer.verify()] == [True]


def test_noise_and_signal_are_those_of_the_gradients(history):
    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.still, self.noisy = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))

        def forward(self, sign):
            return (self.still * 0.5).sum() + (self.noisy * sign).sum()

    model = Fixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, betas=(0.9, 0.9))
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0):
        for step in range(6):
            optimizer.zero_grad()
            model((-1.0) ** step).backward()
            optimizer.step()
    rows = {row["name"]: row for row in dshistory.open(history).audit(quiet=True)}
    assert rows["still"]["gradient_norm"] == pytest.approx(1.0, rel=1e-5)
    assert rows["still"]["gradient_noise"] < 1e-5
    assert rows["still"]["signal_to_noise"] is None or rows["still"]["signal_to_noise"] > 1e5
    assert rows["noisy"]["gradient_noise"] == pytest.approx(2.2, rel=0.2), "a gradient of length 2 against its mean"
    assert rows["noisy"]["signal_to_noise"] < 0.1


def test_bad_input_is_refused_by_name(history, tmp_path):
    model = net()
    explorer, _ = train(history, model, two_groups(model))
    with pytest.raises(NotFoundError, match="is the first of its run"):
        explorer.audit(b=0, quiet=True)
    with pytest.raises(SetupError, match=r"did not come from .*:4 by training on; it came from .*:0, .*:1"):
        explorer.audit(4, 3, quiet=True)
    with pytest.raises(NotFoundError, match="no parameter fits 'nowhere' in the optimizer of"):
        explorer.audit(1, 2, names="nowhere", quiet=True)
    (tmp_path / "weights").mkdir()
    for step in (1, 2):
        save_file(model.state_dict(), tmp_path / "weights" / f"step-{step}.safetensors")
    dshistory.import_checkpoint(tmp_path / "weights", history=tmp_path / "bare", quiet=True)
    with pytest.raises(NotFoundError, match="has no optimizer: an audit compares weights with its moments"):
        dshistory.open(tmp_path / "bare").audit(quiet=True)


def test_an_optimizer_without_parameters_leaves_no_audit_without_rows(history):
    """Nothing tells what such an audit is against, so there is none."""
    model = net()
    explorer, _ = train(history, model, torch.optim.SGD([{"params": []}], lr=1e-2), scheduled=False)
    with pytest.raises(NotFoundError, match="has no optimizer: an audit compares weights with its moments"):
        explorer.audit_all(quiet=True)
    assert not explorer.history.paths.audits_dir(explorer.history.current_run()).exists()


def test_an_optimizer_without_state_has_nothing_to_balance(history):
    model = net()
    explorer, _ = train(history, model, torch.optim.SGD(model.parameters(), lr=1e-2))
    table = explorer.audit(quiet=True)
    assert len(table.unbalanced) == 0
    assert "without a movement that can be checked: 7 (SGD)" in table.note
