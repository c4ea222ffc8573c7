"""`enable` refuses by name what can not be captured, and its session says where it goes on from."""

import pytest
import torch
from capture_helpers import committed_steps, make, one_step

import capture
import dshistory
from catalog.errors import NotFoundError, SetupError, UnsupportedError
from catalog.history import History


@pytest.mark.parametrize("name", ["model", "buffer", "master", "exp_avg", "momentum_buffer", "object"])
def test_a_providers_name_that_is_a_kind_of_tensors_is_refused(history, name):
    model, optimizer = make()
    with pytest.raises(UnsupportedError, match=f"offers an object '{name}', and checkpoints have tensors of the kind"):
        capture.enable(model, optimizer=optimizer, history=history, providers=[capture.Stateful(name, {})])
    assert History.open(history).runs() == []


def test_the_state_of_an_optimizer_of_ones_own_is_a_kind_from_its_first_step_on(history):
    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    model, _ = make()
    optimizer = Slow(model.parameters(), lr=0.1)
    providers = [capture.Stateful("slow", {"a": 1})]
    session = capture.enable(model, optimizer=optimizer, every=1, history=history, providers=providers)
    with pytest.warns(UserWarning, match="step 1 .*tensors of the kind 'slow'"):
        one_step(model, optimizer)
    with pytest.warns(UserWarning, match="step 1 .*tensors of the kind 'slow'"):
        session.close()


@pytest.mark.parametrize("argument", ["scheduler", "scaler"])
def test_what_is_no_scheduler_or_scaler_is_refused(history, argument):
    model, optimizer = make()
    with pytest.raises(SetupError, match=rf"{argument}: a torch\.optim\.adamw\.AdamW is an optimizer: pass it as opt"):
        capture.enable(model, optimizer=optimizer, history=history, **{argument: optimizer})
    with pytest.raises(SetupError, match=f"{argument}: a builtins.object has no state_dict and load_state_dict"):
        capture.enable(model, optimizer=optimizer, history=history, **{argument: object()})


def test_a_second_enable_says_that_it_ends_the_first_session(history):
    model, optimizer = make()
    first = capture.enable(model, optimizer=optimizer, history=history, stats_every=0)
    with pytest.warns(UserWarning, match=f"the session of run {first.run} captures these objects already") as said:
        second = capture.enable(model, optimizer=optimizer, history=history, stats_every=0)
    assert [warning.filename for warning in said] == [__file__]
    assert (first.is_open, second.is_open) == (False, True)
    second.close()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", [{"providers": [capture.Stateful("model", {})]}, {"keep": "last 2, 1kB"}])
def test_an_enable_that_is_refused_leaves_the_open_session_alone(history, tmp_path, options):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0) as first:
        with pytest.raises((UnsupportedError, SetupError)):
            capture.enable(model, optimizer=optimizer, history=tmp_path / "other", **options)
        one_step(model, optimizer)
        assert first.is_open
    assert committed_steps(history, first.run) == [0, 1]
    assert not (tmp_path / "other").exists()


def test_a_restore_says_that_it_ends_the_session(history):
    model, optimizer = make()
    session = capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0)
    one_step(model, optimizer)
    with pytest.raises(NotFoundError, match="2"):
        capture.restore(2, history=history, model=model, optimizer=optimizer)
    assert session.is_open, "a step that is not there ends nothing"
    with pytest.warns(UserWarning, match=f"the session of run {session.run} is closed, since its training is put back"):
        capture.restore(0, history=history, model=model, optimizer=optimizer)
    assert (session.is_open, session.step) == (False, 0)


@pytest.mark.filterwarnings("error")
def test_a_tag_of_a_step_that_is_not_captured_is_told(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=2, history=history, stats_every=0) as session:
        session.tag("initial")
        session.tag("later", 4)
        one_step(model, optimizer)
        with pytest.raises(SetupError, match="tag: the name is empty"):
            session.tag("")
        with pytest.warns(UserWarning, match=r"tag 'lost': step 1 is not captured.*session\.snapshot\(\) before"):
            session.tag("lost")
        session.snapshot()
        session.tag("found")
        one_step(model, optimizer)
        session.tag("due")
    opened = History.open(history)
    assert [opened.resolve(name).step for name in ("initial", "found", "due")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [torch.eye(3).to_sparse()]}, r"mine\['a'\]\[0\]: a tensor of layout torch\.sparse_coo on cpu"),
        ({"a": torch.empty(2, device="meta")}, r"mine\['a'\]: a tensor of layout torch\.strided on meta"),
        ({"a": ["x", ("y", "\ud800")]}, r"mine\['a'\]\[1\]\[1\]: a string with a lone surrogate"),
        ({"a": {"\ud800": 1}}, r"mine\['a'\] \(a key\): a string with a lone surrogate"),
    ],
)
def test_state_without_bytes_is_refused_by_its_place(history, state, message):
    model, optimizer = make()
    with pytest.raises(UnsupportedError, match=message):
        capture.enable(model, optimizer=optimizer, history=history, providers=[capture.Stateful("mine", state)])


def sparse():
    return torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 4))


def test_momentum_of_sparse_gradients_is_refused_by_name(history):
    model = sparse()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UnsupportedError, match=r"'momentum_buffer' of '0\.weight' will be a sparse.*sparse=False"):
        capture.enable(model, optimizer=optimizer, history=history)
    # What shows only later fails the snapshot, by the same names.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0)
    optimizer.param_groups[0]["momentum"] = 0.9
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.warns(UserWarning, match=r"step 1 .*'momentum_buffer' of '0\.weight' has the layout torch\.sparse_coo"):
        optimizer.step()
    with pytest.warns(UserWarning, match="momentum_buffer"):
        session.close()


@pytest.mark.parametrize("resume", ["auto", None])
def test_a_session_says_where_it_goes_on_from_and_at_which_step(history, resume):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0) as first:
        assert (first.step, first.resumed_from) == (0, None)
        assert "goes on" not in repr(first)
        one_step(model, optimizer)
        assert first.step == 1
    model, optimizer = make(seed=9)
    if resume is None:
        capture.restore(history=history, model=model, optimizer=optimizer)
    with capture.enable(model, optimizer=optimizer, every=1, history=history, resume=resume, stats_every=0) as session:
        assert str(session.resumed_from) == f"{first.run}:1"
        assert f"goes on from {first.run}:1, every step" in repr(session)
        for _ in range(session.step, 3):
            one_step(model, optimizer)
    assert committed_steps(history, session.run) == [1, 2, 3]


def test_paths_and_names_that_are_none_are_refused(history):
    model, optimizer = make()
    with pytest.raises(SetupError, match=r"history='\\x00': give the path of a folder"):
        capture.enable(model, optimizer=optimizer, history="\x00")
    with pytest.raises(SetupError, match=r"not by '\\x00'"):
        dshistory.open("\x00")
    capture.enable(model, optimizer=optimizer, history=history, stats_every=0).close()
    with pytest.raises(SetupError, match=r"names=tensor\(3\): give a pattern"):
        capture.restore(history=history, names=torch.tensor(3))
