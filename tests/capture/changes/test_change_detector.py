"""Writes that torch does not count, while a snapshot really is being written, fail that snapshot by name; nothing else
than the step is ever committed.
"""

import multiprocessing
import threading
import time

import pytest
import torch
from capture_helpers import MIB, assert_same, committed_steps, faulty_session, make, one_step, reference
from torch.optim.optimizer import register_optimizer_step_post_hook

import capture
import native
from catalog.errors import CorruptError, SnapshotError

SLOW = {"delay_us": 100_000}


def slow_session(model, optimizer, history, **options):
    """Return a session whose snapshots of a model of width 1000 take about half a second."""
    return faulty_session(
        model, optimizer, history, faults=native.Faults(**SLOW), budget_bytes=10 * MIB, stats_every=0, **options
    )


def swap_in_average(model):
    """The idiom of most libraries for moving averages of the weights."""
    for parameter in model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter) + 0.5)


def clamp_some(model):
    """The weights begin evenly distributed up to 1 / sqrt(1000) = 0.0316, so this changes one in a hundred."""
    model.inner.weight.data.clamp_(max=0.031)


def add(model):
    model.outer.weight.data.add_(1e-6)


def write_through_numpy(model):
    model.inner.weight.detach().numpy()[:500] *= 2.0


def write_from_a_thread(model):
    thread = threading.Thread(target=write_through_numpy, args=(model,))
    thread.start()
    thread.join()


def other_process(model):
    """Return a write by another process, which is there already: to make one may take longer than a snapshot."""
    model.share_memory()
    context = multiprocessing.get_context("fork")
    begin = context.Event()

    def negate(weight):
        begin.wait()
        weight.neg_()

    process = context.Process(target=negate, args=(model.inner.weight.detach(),))
    process.start()

    def write(_):
        begin.set()
        process.join()
        assert process.exitcode == 0

    return write


WRITES = [swap_in_average, clamp_some, add, write_through_numpy, write_from_a_thread, other_process]


@pytest.mark.guards("A checkpoint holds one step")
@pytest.mark.parametrize("write", WRITES)
def test_an_uncounted_write_fails_the_snapshot_by_name(history, write):
    model, optimizer = make(1000)
    if write is other_process:
        write = other_process(model)
    session = slow_session(model, optimizer, history)
    one_step(model, optimizer)
    versions = [parameter._version for parameter in model.parameters()]
    write(model)
    assert versions == [parameter._version for parameter in model.parameters()]
    with pytest.raises(SnapshotError, match=r"step 1.*(weight|bias)'.*written to.*step 1.*session\.modify"):
        session.wait()
    one_step(model, optimizer)
    expected = reference(model, optimizer)
    session.close()
    assert committed_steps(history, session.run) == [0, 2]
    assert_same(capture.restore(f"{session.run}:2", history=history), expected)


def test_with_version_counters_alone_the_same_write_is_torn(history):
    """This guards the test above: the refused snapshot really differs from the step."""
    model, optimizer = make(1500)
    session = slow_session(model, optimizer, history, check="versions")
    one_step(model, optimizer)
    expected = reference(model, optimizer)
    swap_in_average(model)
    for state in optimizer.state.values():
        state["exp_avg"].data.zero_()
        state["exp_avg_sq"].data.zero_()
    session.close()
    with pytest.raises((AssertionError, CorruptError), match=r"torn|checksum"):
        assert_same(capture.restore(f"{session.run}:1", history=history), expected)


@pytest.mark.guards("A checkpoint holds one step")
def test_an_average_swapped_in_for_an_evaluation_and_out_again(history):
    """At the barrier everything is as it was; but the writer has read the average."""
    model, optimizer = make(1000)
    session = slow_session(model, optimizer, history)
    one_step(model, optimizer)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    swap_in_average(model)
    time.sleep(0.3)
    for parameter, weights in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(weights)
    with pytest.raises(SnapshotError, match=r"step 1.*(weight|bias)'.*written to"):
        session.wait()
    session.close()
    assert committed_steps(history, session.run) == [0]


@pytest.mark.guards("A checkpoint holds one step")
@pytest.mark.parametrize("where", ["optimizer", "everywhere"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_after_the_update_belong_to_the_step(history, where, when):
    """A user's own hook that clamps the weights runs after every update, registered before or after `enable`."""
    model, optimizer = make()

    def clamp(*_):
        for parameter in model.parameters():
            parameter.data.clamp_(-0.05, 0.05)

    def register():
        if where == "optimizer":
            return optimizer.register_step_post_hook(clamp)
        return register_optimizer_step_post_hook(clamp)

    expected, hook = {}, register() if when == "before" else None
    session = faulty_session(model, optimizer, history, faults=native.Faults(delay_us=2_000))
    hook = hook or register()
    try:
        for step in range(1, 4):
            one_step(model, optimizer)
            expected[step] = reference(model, optimizer)
    finally:
        hook.remove()
    session.close()
    assert committed_steps(history, session.run) == [0, 1, 2, 3]
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history), state)


def test_a_hook_before_the_update_waits_at_the_barrier_too(history):
    model, optimizer = make(1000)

    def decay(*_):
        for parameter in model.parameters():
            parameter.data.mul_(0.9)

    optimizer.register_step_pre_hook(decay)
    session = slow_session(model, optimizer, history)
    one_step(model, optimizer)
    expected = reference(model, optimizer)
    one_step(model, optimizer)
    session.close()
    assert_same(capture.restore(f"{session.run}:1", history=history), expected)


def test_memory_with_gaps_is_compared_without_what_is_between(history):
    """A parameter that is every second row of a matrix: the other rows are nobody's state."""
    matrix = torch.randn(64, 64)
    model = torch.nn.Module()
    model.register_parameter("rows", torch.nn.Parameter(matrix[::2]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = capture.enable(model, optimizer=optimizer, every=100, history=history)
    model.rows.square().sum().backward()
    optimizer.step()
    matrix.numpy()[1] = 0.0
    expected = model.rows.detach().clone()
    session.close()
    assert torch.equal(capture.restore(1, history=history)["model"]["rows"], expected)


def test_freed_memory_is_named_and_not_read(history):
    model, optimizer = make(1000)
    session = slow_session(model, optimizer, history)
    one_step(model, optimizer)
    model.inner.weight.untyped_storage().resize_(0)
    with pytest.raises(SnapshotError, match=r"inner\.weight'.*written to, or freed"):
        session.wait()
    session.close()
