"""The session's life: cadence, hooks, tags, metrics, exit, and refusals at `enable`."""

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest
import torch
from capture_helpers import assert_same, committed_steps, make, one_step, reference
from places import SUPPORT
from torch.optim.optimizer import _global_optimizer_pre_hooks

import capture
import native
from capture.loops.pytorch.loop import count_from
from capture.publishing.committer import Committer
from capture.snapshot.snapshot import Snapshot
from catalog.errors import NotFoundError, SetupError, SnapshotError, UnsupportedError
from catalog.history import History
from catalog.run_writer import RunWriter
from catalog.verify import verify


def test_the_first_step_every_third_and_the_last(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=3, history=history) as session:
        for _ in range(7):
            one_step(model, optimizer)
    assert committed_steps(history, session.run) == [0, 3, 6, 7]
    assert session.stats.snapshots == 4
    assert len(session.stats.stalls_s) == 7


def test_accumulated_gradients_are_one_step(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert committed_steps(history, session.run) == [0, 1, 2]


def test_a_snapshot_on_demand_once_a_step(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1000, history=history) as session:
        one_step(model, optimizer)
        assert session.snapshot() == 1
        assert session.snapshot() == 1
        one_step(model, optimizer)
        one_step(model, optimizer)
    assert committed_steps(history, session.run) == [0, 1, 3]


def test_closing_leaves_no_hook_behind(history):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)

    def hooks() -> list:
        modules = [len(m._forward_pre_hooks) + len(m._load_state_dict_pre_hooks) for m in model.modules()]
        return [
            modules,
            len(optimizer._optimizer_step_pre_hooks),
            len(optimizer._optimizer_step_post_hooks),
            type(scheduler),
        ]

    before = hooks()
    state = set(scheduler.state_dict())
    session = capture.enable(model, optimizer=optimizer, scheduler=scheduler, every=1, history=history)
    assert hooks() != before
    assert set(scheduler.state_dict()) == state
    session.close()
    session.close()
    assert hooks() == before


def test_enabling_again_closes_the_session_before(history):
    model, optimizer = make()
    first = capture.enable(model, optimizer=optimizer, every=1000, history=history)
    one_step(model, optimizer)
    second = capture.enable(model, optimizer=optimizer, every=1000, history=history)
    assert first.run != second.run
    assert committed_steps(history, first.run) == [0, 1]
    with pytest.raises(SetupError, match="closed"):
        first.snapshot()
    second.close()


def test_a_restore_into_a_model_that_is_being_captured(history):
    """The session ends with its last step saved, and the session that is enabled next is its child."""
    model, optimizer = make()
    session = capture.enable(model, optimizer=optimizer, every=1, history=history)
    expected = {0: reference(model, optimizer)}
    for step in (1, 2, 3):
        one_step(model, optimizer)
        expected[step] = reference(model, optimizer)
    capture.restore(f"{session.run}:2", history=history, model=model, optimizer=optimizer)
    assert_same(reference(model, optimizer), expected[2])
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history), state)
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as child:
        one_step(model, optimizer)
    facts = History.open(history).run_facts(child.run)
    assert (facts.parent_run, facts.parent_step) == (session.run, 2)
    assert_same(capture.restore(3, history=history), reference(model, optimizer))


def test_tags_and_metrics(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        loss = one_step(model, optimizer)
        session.log(loss=torch.tensor(loss), accuracy=0.5)
        session.tag("good")
        with pytest.raises(SetupError, match="one real number"):
            session.log(bad=torch.zeros(2))
        with pytest.raises(SetupError, match="tag"):
            session.tag("12")
    opened = History.open(history)
    assert opened.resolve("good").step == 1
    rows = opened.query("SELECT name, value FROM metrics WHERE step = 1").to_pylist()
    found = {row["name"]: row["value"] for row in rows}
    assert found["accuracy"] == 0.5
    assert found["loss"] == pytest.approx(loss)
    assert {"lr", "step_time_s", "stall_s"} <= found.keys()


def raise_after(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    one_step(model, optimizer)
    raise ZeroDivisionError


def test_leaving_by_an_exception_captures_no_last_step(history):
    model, optimizer = make()
    with (
        pytest.raises(ZeroDivisionError),
        capture.enable(model, optimizer=optimizer, every=100, history=history) as session,
    ):
        raise_after(model, optimizer)
    assert committed_steps(history, session.run) == [0]


EXIT = """
import sys; sys.path.insert(0, {tests!r})
from capture_helpers import make, one_step
import capture
model, optimizer = make()
session = capture.enable(model, optimizer=optimizer, every=100, history={history!r})
one_step(model, optimizer)
{end}
"""


@pytest.mark.guards("The process keeps its life")
@pytest.mark.slow
def test_a_forked_child_that_exits_writes_nothing_into_the_run_of_its_parent(history):
    end = (
        "pid = os.fork()\nif pid == 0:\n    sys.exit(7)\nassert os.waitpid(pid, 0)[1] >> 8 == 7\n"
        "one_step(model, optimizer)"
    )
    script = "import os\n" + EXIT.format(tests=str(SUPPORT), history=str(history), end=end)
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=120)
    assert [ref.step for ref in History.open(history).checkpoints(state=None)] == [0, 2]


@pytest.mark.guards("The process keeps its life")
@pytest.mark.slow
@pytest.mark.parametrize(("end", "steps"), [("", [0, 1]), ("raise SystemExit(3)", [0, 1]), ("1 / 0", [0])])
def test_the_exit_of_the_interpreter_closes_the_session(history, end, steps):
    script = textwrap.dedent(EXIT).format(tests=str(SUPPORT), history=str(history), end=end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == {"": 0, "1 / 0": 1}.get(end, 3), done.stderr
    assert "leaked" not in done.stderr
    opened = History.open(history)
    assert [ref.step for ref in opened.checkpoints()] == steps
    assert not opened.held(opened.current_run())


@pytest.mark.guards("The training goes on")
def test_capture_changes_no_bit_of_the_training(history):
    def weights(capturing: bool) -> dict:
        model, optimizer = make()
        torch.manual_seed(8)
        session = capture.enable(model, optimizer=optimizer, every=1, history=history) if capturing else None
        with session or contextlib.nullcontext():
            for _ in range(5):
                one_step(model, optimizer)
        return reference(model, optimizer)

    assert_same(weights(True), weights(False))


def test_the_facts_name_the_backend_in_use(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, backend="posix") as session:
        pass
    assert History.open(history).run_facts(session.run).facts["backend"] == "posix"


def test_the_default_history(tmp_path, monkeypatch):
    monkeypatch.setenv("DSHISTORY", str(tmp_path / "there"))
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer) as session:
        pass
    assert session.history == tmp_path / "there"
    monkeypatch.delenv("DSHISTORY")
    monkeypatch.chdir(tmp_path)
    with capture.enable(model, optimizer=optimizer) as session:
        pass
    assert session.history == tmp_path / "history"


class WithCallback:
    def state_dict(self) -> dict:
        return {"epoch": 1, "callback": print}

    def load_state_dict(self, state: dict) -> None:
        raise AssertionError("never stored, never loaded")


@pytest.mark.guards("Nothing is unpickled")
def test_state_that_is_not_data_is_refused_at_enable_by_name(history):
    model, optimizer = make()
    with pytest.raises(UnsupportedError) as refused:
        capture.enable(
            model, optimizer=optimizer, history=history, providers=[capture.Stateful("user", WithCallback())]
        )
    assert "user['callback']" in str(refused.value)
    assert not optimizer._optimizer_step_pre_hooks
    assert not History.open(history).checkpoints(state=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": True}, "every=True"),
        ({"on_full": "drop"}, "on_full"),
        ({"resume": "yes"}, "resume"),
        ({"backend": "magic"}, "backend"),
        ({"optimizer": None}, "optimizer"),
    ],
)
def test_enable_refuses_wrong_options(history, options, message):
    model, optimizer = make()
    with pytest.raises(SetupError, match=message):
        capture.enable(model, **{"optimizer": optimizer, "history": history, **options})
    assert not history.exists()


def test_a_module_that_refuses_hooks_is_left_as_it_was(history):
    class Stubborn(torch.nn.Linear):
        def register_forward_hook(self, *_args, **_options):
            raise RuntimeError("no hooks on this module")

    model = Stubborn(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match="no hooks on this module"):
        capture.enable(model, optimizer=optimizer, history=history)
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not _global_optimizer_pre_hooks
    assert not History.open(history).held(History.open(history).current_run())


def test_a_refused_enable_leaves_the_session_before_as_it_was(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        one_step(model, optimizer)
        with pytest.raises(SetupError):
            capture.enable(model, optimizer=optimizer, scheduler=object(), every=1, history=history)
        one_step(model, optimizer)
    assert committed_steps(history, session.run) == [0, 1, 2]


def _of_each_sample(model: torch.nn.Module) -> None:
    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,))

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), torch.randn(5, 4))


def _exported(model: torch.nn.Module) -> None:
    torch.export.export(model, (torch.randn(8, 4),))


@pytest.mark.parametrize("forward", [_of_each_sample, _exported])
def test_a_forward_that_is_only_traced_records_no_loss(history, forward):
    class Loss(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    model = Loss(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        for _ in range(2):
            forward(model)
            loss = model(torch.randn(8, 4))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    logged = History.open(history).query("SELECT value FROM metrics WHERE name = 'loss' ORDER BY step")
    assert logged["value"].to_pylist() == pytest.approx(losses)
    assert committed_steps(history, session.run) == [0, 1, 2]


def test_an_object_that_is_not_a_model_is_refused(history):
    with pytest.raises(SetupError, match="dict"):
        capture.enable({}, history=history)


def test_a_wrapped_model_keeps_its_logical_names(history):
    model, optimizer = make()
    wrapped = torch.nn.DataParallel(model)
    with capture.enable(wrapped, optimizer=optimizer, every=1, history=history) as session:
        one_step(wrapped, optimizer)
    bare, its_optimizer = make(seed=6)
    capture.restore(f"{session.run}:1", history=history, model=bare, optimizer=its_optimizer)
    assert_same(reference(bare, its_optimizer), reference(model, optimizer))


class Shaped(torch.nn.Module):
    """The parameters are transposed, channels-last, 0-dim, empty, frozen and tied."""

    def __init__(self) -> None:
        super().__init__()
        self.flipped = torch.nn.Parameter(torch.randn(5, 7).t())
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.empty = torch.nn.Parameter(torch.empty(0, 4))
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        self.tied = torch.nn.Linear(7, 5, bias=False)
        self.again = self.tied
        self.low = torch.nn.Parameter(torch.randn(6).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picture = self.conv(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).mean()
        return self.again(self.tied(x) @ self.flipped.t()) * self.scale + picture + self.low.float().sum()


def test_tensors_of_every_shape_and_order(history):
    torch.manual_seed(3)
    model = Shaped()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(2, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        step(model, optimizer)
        step(model, optimizer)
    expected = reference(model, optimizer)
    other = Shaped()
    its_optimizer = torch.optim.Adam([p for p in other.parameters() if p.requires_grad])
    capture.restore(f"{session.run}:2", history=history, model=other, optimizer=its_optimizer)
    assert_same(reference(other, its_optimizer), expected)
    assert other.flipped.stride() == model.flipped.stride()
    torch.manual_seed(4)
    step(model, optimizer)
    torch.manual_seed(4)
    step(other, its_optimizer)
    assert_same(reference(other, its_optimizer), reference(model, optimizer))


def test_io_uring_is_chosen_where_it_works(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, history=history) as session:
        pass
    expected = "posix" if native.probe_io_uring() else "io_uring"
    assert History.open(history).run_facts(session.run).facts["backend"] == expected


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"z": torch.tensor(1 + 2j)}, "metric 'z' is a torch.complex64"),
        ({"z": 1 + 2j}, r"metric 'z' is \(1\+2j\)"),
        ({"z": None}, "metric 'z' is None"),
        ({"z": torch.ones(3)}, r"shape \(3,\)"),
        ({"\ud800": 1.0}, "no valid text"),
    ],
)
def test_a_metric_that_is_not_a_real_number_is_refused_where_it_is_given(history, metrics, message):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        one_step(model, optimizer)
        with pytest.raises(SetupError, match=message):
            session.log(**metrics)
    assert committed_steps(history, session.run) == [0, 1]


def test_metrics_are_given_by_name_or_in_a_dict(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        one_step(model, optimizer)
        session.log({"val/loss": 0.5, "seen": torch.tensor(3)}, accuracy=0.25)
        with pytest.raises(SetupError, match="metric 'seen' is given twice, as 3 and as 4"):
            session.log({"seen": 3}, seen=4)
        with pytest.raises(SetupError, match=r"log: 0\.5 has no name: give metrics as log\(loss=0\.5\)"):
            session.log(0.5)
    rows = History.open(history).query(
        "SELECT name, value FROM metrics WHERE step = 1 AND name IN ('val/loss', 'seen', 'accuracy')"
    )
    assert {row["name"]: row["value"] for row in rows.to_pylist()} == {"val/loss": 0.5, "seen": 3.0, "accuracy": 0.25}


@pytest.mark.parametrize(("name", "step"), [(7, None), ("\ud800", None), ("x", "1"), ("x", -1), ("x", True), ("", 1)])
def test_an_invalid_tag_is_refused(history, name, step):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, history=history) as session, pytest.raises(SetupError, match="tag"):
        session.tag(name, step)


def test_a_row_that_cannot_be_written_is_reported_and_the_rest_goes_on(history):
    """The conversion of a metric fails off the training thread, where no caller could catch the error."""

    class Unreadable:
        def __float__(self) -> float:
            raise RuntimeError("the device is gone")

    model, optimizer = make()
    session = capture.enable(model, optimizer=optimizer, every=1, history=history)
    one_step(model, optimizer)
    session.wait()
    session._committer.metrics(0, {"temperature": Unreadable(), "fine": 2.0})
    with pytest.warns(UserWarning, match=r"metric 'temperature' of step 0.*device is gone"):
        session.close()
    assert committed_steps(history, session.run) == [0, 1]
    rows = History.open(history).query("SELECT value FROM metrics WHERE name = 'fine'").to_pylist()
    assert [row["value"] for row in rows] == [2.0]


class Breaking:
    """The state of this user object cannot be read from the `limit`-th time on."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def state_dict(self) -> dict:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("boom")
        return {}

    def load_state_dict(self, state: dict) -> None: ...


@pytest.mark.guards("The training goes on")
@pytest.mark.filterwarnings("ignore:the snapshot")
@pytest.mark.parametrize("limit", [2, 3, 4, 5, 6])
def test_a_provider_that_raises_fails_its_snapshots_and_not_the_training(history, limit):
    model, optimizer = make()
    providers = [capture.Stateful("mine", Breaking(limit))]
    session = capture.enable(model, optimizer=optimizer, every=1, history=history, providers=providers)
    for _ in range(4):
        one_step(model, optimizer)
    session.close()
    assert all("boom" in str(failure) for failure in session.failures)
    assert session.failures
    assert committed_steps(history, session.run) == list(range(1 + (limit - 2) // 2))


@pytest.mark.guards("The process keeps its life")
def test_a_forked_child_may_train_on(history):
    """The child's training does not touch the parent's run, and the parent goes on unaffected."""
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        one_step(model, optimizer)
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                for _ in range(3):
                    one_step(model, optimizer)
                session.close()
                status = 0
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        one_step(model, optimizer)
    assert committed_steps(history, session.run) == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:the snapshot")
def test_a_strict_close_raises_what_no_wait_has_raised(history):
    """`wait` raises what was warned of, too; the second error has only what came later."""
    model, optimizer = make()
    providers = [capture.Stateful("mine", Breaking(2))]
    session = capture.enable(model, optimizer=optimizer, every=2, history=history, providers=providers, strict=True)
    one_step(model, optimizer)
    with pytest.warns(UserWarning, match="the snapshot of step 2"):
        one_step(model, optimizer)
    one_step(model, optimizer)
    with pytest.raises(SnapshotError, match="step 2 "):
        session.wait()
    with pytest.raises(SnapshotError, match="step 3 ") as failure:
        session.close()
    assert "step 2 " not in "".join([str(failure.value), *getattr(failure.value, "__notes__", ())])


def test_a_scheduler_that_is_not_captured_is_reported(history):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.warns(UserWarning, match=r"scheduler that is not captured.*scheduler=scheduler") as said:
        capture.enable(model, optimizer=optimizer, history=history).close()
    assert [warning.filename for warning in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture.enable(model, optimizer=optimizer, scheduler=scheduler, history=history).close()


def test_one_name_is_a_list_of_one_and_a_misspelt_one_gets_its_neighbours(history):
    model, optimizer = make()
    capture.enable(model, optimizer=optimizer, history=history).close()
    assert list(capture.restore(0, history=history, names="inner.weight", kinds="model")["model"]) == ["inner.weight"]
    with pytest.raises(NotFoundError, match=r"the nearest are inner\.weight"):
        capture.restore(0, history=history, names="iner.weight")


def test_a_plain_module_is_not_mistaken_for_an_engine(history):
    model, optimizer = make()
    capture.enable(model, optimizer=optimizer, history=history).close()
    with pytest.raises(SetupError, match="pass a plain module as model="):
        capture.restore(0, history=history, engine=model)


def test_a_parameter_without_a_shape_is_refused_by_name(history):
    model = torch.nn.Sequential(torch.nn.LazyLinear(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"'0\.(weight|bias)' has no shape yet"):
        capture.enable(model, optimizer=optimizer, history=history)


def test_an_embedding_that_forward_renormalises_is_read_at_the_step(history):
    model = torch.nn.Embedding(1000, 64, max_norm=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = {}
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        for step in range(1, 4):
            model(torch.arange(1000)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected[step] = model.weight.detach().clone()
    for step, weight in expected.items():
        restored = capture.restore(f"{session.run}:{step}", history=history)["model"]["weight"]
        assert torch.equal(restored, weight)


def test_a_run_that_is_still_being_written_is_not_resumed(history):
    model, optimizer = make()
    other, its_optimizer = make(seed=6)
    with capture.enable(model, optimizer=optimizer, history=history, every=1) as session:
        one_step(model, optimizer)
        with pytest.raises(SetupError, match=f"run {session.run} of .* is still being written"):
            capture.enable(other, optimizer=its_optimizer, history=history, resume="auto")
        one_step(model, optimizer)
    with capture.enable(other, optimizer=its_optimizer, history=history, resume="auto"):
        assert_same(reference(other, its_optimizer), reference(model, optimizer))


FACTS = {"run", "history", "stats", "failures", "step", "resumed_from", "is_open"}
FOR_USERS = FACTS | {"snapshot", "log", "tag", "wait", "modify", "close"}


def test_a_session_has_public_names_for_users_only(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, history=history) as session:
        assert {name for name in dir(session) if not name.startswith("_")} == FOR_USERS


def test_a_session_is_shown_with_its_run_its_folder_and_its_state(history):
    model, optimizer = make()
    session = capture.enable(model, optimizer=optimizer, every=2, history=history)
    one_step(model, optimizer)
    one_step(model, optimizer)
    session.wait()
    assert repr(session) == (
        f"<Session: run {session.run} in {session.history}, every 2 steps, 2 captured so far, open>"
    )
    session.close()
    assert repr(session).endswith("2 captured so far, closed>")


def test_an_interval_of_one_reads_well(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        assert ", every step, " in repr(session)


@pytest.mark.guards("A checkpoint exists whole or not at all")
def test_a_step_that_is_counted_again_while_it_is_written_stays_what_it_was(history, monkeypatch):
    """Both snapshots would write the same files, the second one over those that a marker names."""
    go = threading.Event()
    publish, wait_below, start = RunWriter.publish_part, Committer.wait_below, Snapshot.start
    begun = []

    def publish_late(run, step, **part):
        assert step != 2 or go.wait(60)
        publish(run, step, **part)

    def wait_for_all(committer, count, **limit):
        if count == 1:
            go.set()
        return wait_below(committer, count, **limit)

    def start_another(*given, **options):
        snapshot = start(*given, **options)
        begun.append(snapshot.step)
        if begun.count(2) > 1:
            go.set()
        return snapshot

    monkeypatch.setattr(RunWriter, "publish_part", publish_late)
    monkeypatch.setattr(Committer, "wait_below", wait_for_all)
    monkeypatch.setattr(Snapshot, "start", start_another)
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, history=history, every=2, stats_every=0) as session:
        one_step(model, optimizer)
        one_step(model, optimizer)
        first = model.state_dict()["inner.weight"].clone()
        model.load_state_dict(make(seed=5)[0].state_dict())
        count_from(optimizer, 1)
        with pytest.warns(UserWarning, match="step 2 of run .* is captured already"):
            one_step(model, optimizer)
        one_step(model, optimizer)
    opened = History.open(history)
    assert verify(opened) == []
    assert opened.steps(session.run) == [0, 2, 3]
    assert torch.equal(capture.restore(2, history=history)["model"]["inner.weight"], first)
