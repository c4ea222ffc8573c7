"""Steps of a redo log have the bits of a full capture of the same training; whatever breaks the chain is named."""

import functools
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import capture
import native
from capture.redo.key_frames import compare_key_frame, key_frames
from capture.redo_log import recorder, redo_log
from capture.state.update_rule import update_rule
from catalog.errors import CorruptError, FormatError, MismatchError, NotFoundError, SetupError, UnsupportedError
from catalog.format.redo_reader import read_redo_segment
from catalog.format.redo_segment import RedoTensor, redo_segments
from catalog.format.redo_writer import RedoFileWriter
from catalog.history import History
from catalog.read.redo import recorded_steps
from catalog.records import CheckpointRef
from catalog.verify import verify
from dshistory.explorer import Explorer

ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
SGD = functools.partial(torch.optim.SGD, lr=1e-2)

VARIANTS = {
    "adam": ADAM,
    "adamw": ADAMW,
    "adamw foreach": functools.partial(ADAMW, foreach=True),
    "adamw fused": functools.partial(ADAMW, fused=True),
    "adam fused amsgrad": functools.partial(ADAM, fused=True, amsgrad=True, maximize=True),
    "adam amsgrad": functools.partial(ADAM, amsgrad=True, weight_decay=0.1),
    "adamw maximize": functools.partial(ADAMW, maximize=True, foreach=True),
    "adamw rate as a tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2)),
    "sgd": SGD,
    "sgd momentum": functools.partial(SGD, momentum=0.9, dampening=0.1),
    "sgd nesterov foreach": functools.partial(SGD, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": functools.partial(SGD, momentum=0.9, fused=True, maximize=True, weight_decay=0.1),
}


@pytest.fixture(params=["beside the training", "at once"])
def packing(request, monkeypatch):
    """Let gradients be packed in the one way or the other, whatever cores this machine has."""
    monkeypatch.setattr(recorder, "trains_on_all_cores", lambda *_, **__: request.param == "at once")
    return request.param


class Model(torch.nn.Module):
    """Weights whose size no vector divides, a frozen one, one without gradients, tied ones, and changing buffers."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(7, 33)
        self.norm = torch.nn.BatchNorm1d(33)
        self.second = torch.nn.Linear(33, 1021, bias=False)
        self.tied = torch.nn.Linear(33, 1021, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.unused = torch.nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(50))

    def forward(self, x):
        return self.tied(self.norm(self.first(x)))


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def others(model):
    return [parameter for parameter in model.parameters() if parameter is not model.second.weight]


def one_step(model, optimizer, schedule, step):
    """Make a step of the training; at each fifth a weight has no gradient."""
    model(torch.randn(5, 7).to(model.first.weight.dtype)).square().mean().backward()
    if step % 5 == 0:
        model.first.bias.grad = None
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def train(
    history,
    *,
    make=ADAMW,
    dtype=torch.float32,
    steps=23,
    between=lambda step, session, model, optimizer: None,
    **options,
):
    """Train with clipping and a schedule, in which some steps have no gradient for some weights."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    decayed = [model.second.weight]
    optimizer = make([{"params": decayed, "weight_decay": 0.2}, {"params": others(model)}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    # Hooks of the user's may change what the update reads, and run after those that a session has installed before.
    session = capture.enable(model, optimizer=optimizer, scheduler=schedule, history=history, stats_every=0, **options)
    optimizer.register_step_pre_hook(lambda *_: clip(model))
    with session:
        for step in range(1, steps + 1):
            one_step(model, optimizer, schedule, step)
            between(step, session, model, optimizer)
    return History.open(history), session.run


def state_of_training(step, root):
    """Return a step without the tensors of providers, of which a redo log knows nothing."""
    state = capture.restore(step, history=root)
    return {kind: tensors for kind, tensors in state.items() if kind != "lr_scheduler"}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for kind, tensors in one.items():
        assert tensors.keys() == other[kind].keys()
        for name, tensor in tensors.items():
            same = tensor.dtype == other[kind][name].dtype and torch.equal(
                tensor.contiguous().view(-1).view(torch.uint8),
                other[kind][name].contiguous().view(-1).view(torch.uint8),
            )
            assert same, f"{kind} {name}"


@pytest.mark.guards("A redo step has the bits of the training")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rebuilt_step_is_the_captured_one(tmp_path, variant, precision, packing):
    if (variant, precision) == ("sgd fused", "bf16"):
        pytest.skip("refused when the session begins, because torch gives it other bits each time")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    whole, _ = train(tmp_path / "whole", make=VARIANTS[variant], dtype=dtype, steps=11, every=1)
    sparse, run = train(tmp_path / "sparse", make=VARIANTS[variant], dtype=dtype, steps=11, every=5, redo=True)
    assert sparse.steps(run) == [0, 5, 10, 11]
    assert recorded_steps(sparse.paths, run) == list(range(1, 12))
    for step in range(12):
        captured, rebuilt = (state_of_training(step, history.root) for history in (whole, sparse))
        assert_equal(captured, rebuilt)
    assert [compare_key_frame(sparse, frame) > 0 for frame in key_frames(sparse, run)] == [True] * 3
    assert verify(sparse) == []


@pytest.mark.guards("A redo step has the bits of the training")
def test_an_update_is_cut_among_as_many_threads_as_it_was(tmp_path):
    """Where torch cuts a large bfloat16 tensor among threads, SGD rounds otherwise."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        torch.manual_seed(0)
        model = torch.nn.Linear(257, 1021, dtype=torch.bfloat16)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        weights = {}
        options = {"every": 10, "history": tmp_path, "redo": True, "stats_every": 0, "fingerprints": False}
        with capture.enable(model, optimizer=optimizer, **options):
            for step in range(1, 9):
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape).bfloat16()
                optimizer.step()
                weights[step] = model.weight.detach().clone()
        torch.set_num_threads(1)
        rebuilt = capture.restore(7, history=tmp_path)["model"]["weight"]
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rebuilt, weights[7])


@pytest.mark.guards("A redo step has the bits of the training")
def test_a_flipped_byte_is_found_and_named(tmp_path, packing):
    history, run = train(tmp_path, every=10, redo=True)
    (name,) = redo_segments(history.paths, run)
    path = history.paths.redo_dir(run) / name.name
    segment = read_redo_segment(path, run=run)
    step = next(step for step in segment.steps if step.step == 13)
    block = next(one for one in step.blocks if segment.tensors[one.tensor].name == "second.weight")
    content = bytearray(path.read_bytes())
    content[block.offset + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=r"step 13: gradient of 'second\.weight': checksum .* changed or damaged"):
        capture.restore(15, history=tmp_path)
    assert capture.restore(12, history=tmp_path)
    assert [problem.file for problem in verify(history)] == [history.paths.relative(path)]
    content[-30] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=r"rank-00000-0.*\.redo: "):
        capture.restore(12, history=tmp_path)


def test_a_segment_that_asks_for_other_memory_than_its_training_is_refused(tmp_path):
    history, run = train(tmp_path, steps=12, every=10, redo=True)
    (name,) = redo_segments(history.paths, run)
    segment = read_redo_segment(history.paths.redo_dir(run) / name.name, run=run)
    writer = RedoFileWriter(history.paths, run, 0, segment.rule, segment.writes)
    zeros, packer = memoryview(bytes(8 << 20)), native.ParallelPacker(threads=1)
    tensor = RedoTensor("gradient", "second.weight", "F32", (64 * len(zeros) // 4,))
    for _ in range(64):
        writer.pack([(tensor, zeros)], packer)
    writer.end_step(13, groups=segment.steps[-1].groups or segment.steps[0].groups, broken=None)
    writer.publish()
    with pytest.raises(FormatError, match=r"step 13: gradient of 'second.weight': is F32 of shape \[134217728\]"):
        capture.restore(13, history=tmp_path)


@pytest.mark.guards("A redo step has the bits of the training")
def test_what_an_update_has_not_made_is_refused_by_name(tmp_path):
    def edit(step, session, model, optimizer):
        if step == 3:
            with session.modify(), torch.no_grad():
                model.first.weight.mul_(0.5)
        if step == 13:
            with torch.no_grad():
                model.first.bias.clamp_(-0.01, 0.01)

    history, _ = train(tmp_path, every=10, redo=True, between=edit)
    assert capture.restore(2, history=history.root)
    for step in (3, 9):
        with pytest.raises(MismatchError, match=r"the state after step 3 is not what its update made: session\.modify"):
            capture.restore(step, history=history.root)
    assert capture.restore(12, history=history.root)
    with pytest.raises(MismatchError, match=r"after step 13 .*: first\.bias was written outside the update"):
        capture.restore(14, history=history.root)
    assert capture.restore(21, history=history.root)


@pytest.mark.guards("A redo step has the bits of the training")
def test_an_edit_of_a_step_that_is_final_breaks_the_next_one(tmp_path):
    def edit(step, session, model, optimizer):
        if step == 3:
            session.wait()
            with session.modify(), torch.no_grad():
                model.first.weight.mul_(0.5)

    train(tmp_path, every=10, redo=True, fingerprints=False, between=edit)
    assert capture.restore(3, history=tmp_path)
    with pytest.raises(MismatchError, match=r"the state after step 4 is not what its update made: session\.modify"):
        capture.restore(5, history=tmp_path)


@pytest.mark.guards("A redo step has the bits of the training")
@pytest.mark.parametrize("step", [0, 10])
def test_a_write_behind_a_checkpoint_breaks_the_step_after_it(tmp_path, step):
    """The checkpoint has the bytes from before the write, and steps are made from it."""

    def write(now, session, model, optimizer):
        if now == step:
            time.sleep(0.5)
            clamp(model.second.weight)

    torch.manual_seed(0)
    model = Model()
    optimizer = ADAMW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    options = {"optimizer": optimizer, "every": 10, "history": tmp_path, "fingerprints": False, "stats_every": 0}
    with capture.enable(model, redo=True, **options) as session:
        write(0, session, model, optimizer)
        for now in range(1, 15):
            one_step(model, optimizer, schedule, now)
            write(now, session, model, optimizer)
    with pytest.raises(MismatchError, match=rf"after step {step + 1} .*: second\.weight was written outside"):
        capture.restore(step + 2, history=tmp_path)


@pytest.mark.guards("A redo step has the bits of the training")
def test_weights_that_no_update_makes_are_compared_too(tmp_path):
    """As of a teacher, which follows the student beside the optimizer, past torch's version counters."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"student": torch.nn.Linear(4, 4), "teacher": torch.nn.Linear(4, 4)})
    optimizer = ADAMW(model["student"].parameters())
    with capture.enable(
        model, optimizer=optimizer, every=10, history=tmp_path, redo=True, check="versions", stats_every=0
    ) as session:
        for _ in range(13):
            model["student"](torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            model["teacher"].weight.data.lerp_(model["student"].weight.detach(), 0.1)
    with pytest.raises(MismatchError, match=r"step 12 of run .*: model 'teacher\.weight' differs from the fingerprint"):
        capture.restore(12, history=tmp_path)
    frame = next(one for one in key_frames(History.open(tmp_path), session.run) if one.ref.step == 10)
    with pytest.raises(MismatchError, match="teacher"):
        compare_key_frame(History.open(tmp_path), frame)


@pytest.mark.parametrize("added", ["before the session", "within it"])
def test_a_hook_that_writes_after_the_update_is_named(tmp_path, added):
    """What it writes is no part of the update, wherever it stands among the hooks."""
    ended = [0]

    def write(optimizer, *_):
        if ended[0] >= 4:
            clamp(optimizer.param_groups[0]["params"][0])

    def make(groups):
        optimizer = ADAMW(groups)
        if added == "before the session":
            optimizer.register_step_post_hook(write)
        return optimizer

    def between(step, session, model, optimizer):
        ended[0] = step
        if step == 4 and added == "within it":
            optimizer.register_step_post_hook(write)

    train(tmp_path, make=make, every=10, redo=True, fingerprints=False, between=between)
    assert capture.restore(4, history=tmp_path)
    with pytest.raises(MismatchError, match=r"after step 5 .*: second\.weight was written outside the update"):
        capture.restore(5, history=tmp_path)


def test_a_hook_that_is_added_within_the_update_is_named(tmp_path):
    """It comes behind the one that copies the gradients, and before the update."""

    def hook(step, session, model, optimizer):
        if step == 4:

            def late(*_):
                model.second.weight.grad[0].zero_()

            handle = register_optimizer_step_pre_hook(
                lambda *_: (optimizer.register_step_pre_hook(late), handle.remove())[1]
            )

    train(tmp_path, every=10, redo=True, fingerprints=False, steps=6, between=hook)
    assert capture.restore(4, history=tmp_path)
    with pytest.raises(
        MismatchError, match=r"after step 5 .*: a hook of its optimizer was added while it was under way"
    ):
        capture.restore(5, history=tmp_path)


def test_buffers_that_outgrow_the_log_break_their_step(tmp_path, monkeypatch):
    """Readers would refuse them; the next checkpoint has them, and steps are made from it."""
    monkeypatch.setattr("capture.redo_log.changed_contents.MOST_MORE_BYTES", 100_000)

    def grow(step, session, model, optimizer):
        if step == 3:
            model.table = torch.arange(30_000)

    train(tmp_path, every=10, redo=True, steps=12, between=grow)
    assert capture.restore(2, history=tmp_path)
    with pytest.raises(MismatchError, match=r"after step 4 .*: .* take 2\d{5} bytes, where 100\d{3} can be recorded"):
        capture.restore(5, history=tmp_path)
    assert capture.restore(11, history=tmp_path)["buffer"]["table"].numel() == 30_000


def clamp(weight):
    with torch.no_grad():
        weight.clamp_(-0.01, 0.01)


def test_a_closure_is_refused_by_name(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    with capture.enable(model, optimizer=optimizer, every=10, history=tmp_path, redo=True):
        for _ in range(3):
            optimizer.step(closure)
    with pytest.raises(MismatchError, match=r"after step 1 .*: its update was given a closure"):
        capture.restore(2, history=tmp_path)


def test_bytes_written_past_the_version_counters_are_found_by_the_fingerprint(tmp_path):
    def write(step, session, model, optimizer):
        if step == 4:
            model.second.weight.data.mul_(0.5)

    train(tmp_path, every=10, redo=True, between=write)
    assert capture.restore(4, history=tmp_path)
    with pytest.raises(MismatchError, match=r"step 5 of run .*: model 'second\.weight' differs from the fingerprint"):
        capture.restore(7, history=tmp_path)


@pytest.mark.guards("A redo step has the bits of the training")
def test_without_fingerprints_the_next_checkpoint_says_what_differs(tmp_path):
    def write(step, session, model, optimizer):
        if step == 4:
            model.second.weight.data.mul_(0.5)

    history, run = train(tmp_path, every=10, redo=True, fingerprints=False, between=write)
    first, *others = key_frames(history, run)
    with pytest.raises(MismatchError, match=r"step 10 of run .* has other bits"):
        compare_key_frame(history, first)
    assert [compare_key_frame(history, frame) > 0 for frame in others] == [True, True]


@pytest.mark.parametrize("key", ["torch", "capability", "flush_denormal", "machine", "default_dtype"])
def test_where_an_update_has_other_bits_it_is_refused(tmp_path, monkeypatch, key):
    found = redo_rule()
    monkeypatch.setattr("capture.redo_log.recorder.update_rule", lambda _: {**found, key: "another"})
    train(tmp_path, every=10, redo=True)
    with pytest.raises(MismatchError, match=r"step 1 of run .* would have other bits here: .* was 'another', here "):
        capture.restore(5, history=tmp_path)


def redo_rule():
    return update_rule(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))


def test_a_step_that_is_missing_is_named(tmp_path, monkeypatch):
    real = RedoFileWriter.pack
    failing = iter([False] * 5 + [True])

    def pack(*args):
        if next(failing, False):
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(RedoFileWriter, "pack", pack)
    monkeypatch.setattr(redo_log, "_SEGMENT_S", 0.0)
    history, run = train(tmp_path, every=10, redo=True)
    missing = sorted(set(range(1, 24)) - set(recorded_steps(history.paths, run)))
    assert missing
    assert missing[0] > 1
    with pytest.raises(NotFoundError, match=f"the redo log has no record of step {missing[0]}"):
        capture.restore(9, history=tmp_path)
    assert capture.restore(missing[0] - 1, history=tmp_path)
    events = history.query("SELECT step, detail FROM events WHERE name = 'redo_left_out'").to_pylist()
    assert [row["step"] for row in events] == missing
    assert "No space left" in events[0]["detail"]


def test_a_training_that_does_not_wait_leaves_steps_out(tmp_path, monkeypatch, packing):
    held = "add" if packing == "at once" else "pack"
    real, release = getattr(RedoFileWriter, held), redo_log.RedoLog.release
    go, is_free = threading.Event(), threading.Event()
    monkeypatch.setattr(RedoFileWriter, held, lambda *args: go.wait() and real(*args))
    monkeypatch.setattr(redo_log.RedoLog, "release", lambda log, memory: (release(log, memory), is_free.set()))

    def pack_after_the_sixth(step, *_):
        if step == 6:
            go.set()
            is_free.wait()

    history, run = train(tmp_path, every=10, redo=True, on_full="skip", steps=9, between=pack_after_the_sixth)
    assert recorded_steps(history.paths, run)[:3] == [1, 2, 7]
    with pytest.raises(NotFoundError, match="no record of step 3"):
        capture.restore(5, history=tmp_path)


def test_parameters_that_join_begin_another_chain(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model[0].parameters())
    with capture.enable(model, optimizer=optimizer, every=5, history=tmp_path, redo=True) as session:
        for step in range(1, 13):
            if step == 3:
                optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.1})
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.failures == []
    assert capture.restore(2, history=tmp_path)
    with pytest.raises(MismatchError, match="step 3: the optimizer has other parameters from this step on"):
        capture.restore(4, history=tmp_path)
    assert capture.restore(6, history=tmp_path)


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
import test_redo
test_redo.train({history!r}, every=10, redo=True, steps=10**6, between=lambda step, *_: print(step, flush=True))
"""


@pytest.mark.slow
@pytest.mark.guards("A redo step has the bits of the training")
def test_a_killed_training_leaves_the_steps_up_to_the_tear(tmp_path):
    script = SCRIPT.format(tests=str(Path(__file__).parent), history=str(tmp_path / "killed"))
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE)
    folder = None
    try:
        while folder is None or len(list(folder.glob("rank-*.redo"))) < 2:
            assert process.stdout.readline(), "the training ended by itself"
            folder = next(iter((tmp_path / "killed" / "runs").glob("*/redo")), None)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    history = History.open(tmp_path / "killed")
    (run,) = (facts.run for facts in history.runs())
    assert verify(history) == []
    recorded = recorded_steps(history.paths, run)
    assert recorded == list(range(1, recorded[-1] + 1))
    last = max(step for step in recorded if step not in history.steps(run))
    train(tmp_path / "whole", steps=last, every=last)
    assert_equal(capture.restore(last, history=tmp_path / "whole"), capture.restore(last, history=tmp_path / "killed"))
    with pytest.raises(NotFoundError, match=f"step {recorded[-1] + 1000} was not captured"):
        capture.restore(recorded[-1] + 1000, history=tmp_path / "killed")


def test_nothing_is_written_by_default(tmp_path):
    history, run = train(tmp_path)
    assert not history.paths.redo_dir(run).exists()
    assert redo_segments(history.paths, run) == []
    with pytest.raises(NotFoundError, match="step 3 was not captured"):
        capture.restore(3, history=tmp_path)


@pytest.mark.guards("Resume is exact")
def test_a_training_goes_on_from_a_step_of_the_log(tmp_path, packing):
    history, run = train(tmp_path, every=10, redo=True)
    torch.manual_seed(1)
    model = Model()
    optimizer = ADAMW([{"params": [model.second.weight], "weight_decay": 0.2}, {"params": others(model)}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    live = {"model": model, "optimizer": optimizer, "scheduler": schedule}
    assert capture.restore(13, history=tmp_path, **live) == CheckpointRef(run, 13)
    assert schedule.last_epoch == 13
    expected = {step: state_of_training(step, tmp_path)["model"] for step in (14, 17, 23)}
    optimizer.register_step_pre_hook(lambda *_: clip(model))
    options = {"optimizer": optimizer, "scheduler": schedule, "every": 100, "redo": True, "stats_every": 0}
    with capture.enable(model, history=tmp_path, **options) as session:
        assert session.step == 13
        for step in range(14, 24):
            one_step(model, optimizer, schedule, step)
            if step in expected:
                assert_equal({"model": expected[step]}, {"model": named(model)})
    assert (history.run_facts(session.run).parent_run, history.run_facts(session.run).parent_step) == (run, 13)
    assert_equal({"model": expected[17]}, {"model": state_of_training(17, tmp_path)["model"]})
    of_parent = capture.restore(f"{run}:12", history=tmp_path)["model"]
    assert_equal({"model": of_parent}, {"model": capture.restore(12, history=tmp_path)["model"]})


def test_a_checkpoint_that_was_removed_is_made_again_with_its_objects(tmp_path):
    history, run = train(tmp_path, every=5, redo=True)
    whole = capture.restore(10, history=tmp_path, kinds=["model", "exp_avg"])
    objects = capture_objects(tmp_path, 10)
    Explorer.open(tmp_path).remove([5, 10, 15], force=True)
    assert 10 not in history.steps(run)
    assert_equal(whole, capture.restore(10, history=tmp_path, kinds=["model", "exp_avg"]))
    assert capture_objects(tmp_path, 10) == objects


def capture_objects(root, step):
    """Put a live training back to a step, and return where its schedule, rates and random numbers are."""
    model = Model()
    optimizer = ADAMW([{"params": [model.second.weight], "weight_decay": 0.2}, {"params": others(model)}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    capture.restore(step, history=root, model=model, optimizer=optimizer, scheduler=schedule)
    return schedule.last_epoch, optimizer.param_groups[0]["lr"], torch.rand(1).item()


def named(model):
    return {name: one.detach().clone() for name, one in model.named_parameters(remove_duplicate=False)}


def test_an_object_that_is_too_large_is_named(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 1000)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"optimizer": optimizer, "history": tmp_path / "h", "redo": True, "stats_every": 0}
    with capture.enable(model, every=10, providers=[capture.Stateful("ema", average)], **options) as session:
        for _ in range(13):
            model(torch.randn(2, 300)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
    assert session.failures == []
    assert set(capture.restore(2, history=tmp_path / "h")) == {"model"}
    target = {"model": model, "optimizer": optimizer, "history": tmp_path / "h"}
    for step in (2, 12):
        with pytest.raises(UnsupportedError, match="the object 'ema' was too large for the redo log"):
            capture.restore(step, providers=[capture.Stateful("ema", average)], **target)
        with pytest.warns(UserWarning, match="also has ema, which nothing here takes"):
            capture.restore(step, **target)
    # Whoever asks for nothing of it is not refused.
    explorer = Explorer.open(tmp_path / "h")
    explorer.export(12, tmp_path / "step-12.safetensors")
    assert len(explorer.audit(11, 12)) > 0


def test_a_buffer_that_is_not_there_any_more_breaks_its_step(tmp_path):
    """The log can't say that it is gone: the step would be given back one that a capture of it has not."""

    def let_go(step, session, model, optimizer):
        if step == 3:
            del model.table

    train(tmp_path, every=10, redo=True, steps=12, between=let_go)
    assert "table" in capture.restore(3, history=tmp_path)["buffer"]
    with pytest.raises(MismatchError, match=r"after step 4 .*: the buffer 'table' is not there any more"):
        capture.restore(5, history=tmp_path)
    assert "table" not in capture.restore(11, history=tmp_path)["buffer"]


def test_steps_that_the_disk_does_not_take_are_warned_of_once_and_named_afterwards(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    def empty_again(step, *_):
        if step == 6:
            monkeypatch.undo()

    monkeypatch.setattr(RedoFileWriter, "publish", full)
    monkeypatch.setattr(redo_log, "_SEGMENT_S", 0.0)
    with pytest.warns(UserWarning, match=r"step 1 is not in the redo log: .*No space left") as told:
        history, run = train(tmp_path, every=50, redo=True, steps=9, between=empty_again)
    assert sum("not in the redo log" in str(one.message) for one in told) == 1
    assert history.steps(run) == [0, 9]
    with pytest.raises(NotFoundError, match=r"step 2 .* is not in the redo log since it was left out on .*No space"):
        history.resolve(2)


class Own(torch.optim.AdamW):
    pass


REFUSED = {
    "an unknown class": (lambda m: {"optimizer": Own(m.parameters())}, r"\.Own may read more than gradients"),
    "lbfgs": (lambda m: {"optimizer": torch.optim.LBFGS(m.parameters())}, r"LBFGS may read more than gradients"),
    "several": (
        lambda m: {"optimizer": [torch.optim.SGD(m.first.parameters()), torch.optim.SGD(m.second.parameters())]},
        "SGD, SGD: only a training with one optimizer",
    ),
    "fused sgd of low precision": (
        lambda m: {"optimizer": torch.optim.SGD(m.bfloat16().parameters(), fused=True)},
        r"fused SGD gives torch\.bfloat16 weights other bits each time it runs",
    ),
    "a layout": (
        lambda m: {"optimizer": ADAMW([torch.nn.Parameter(torch.ones(3, 4).t())])},
        r"of shape \(4, 3\) whose elements are not in row-major order",
    ),
    "a scale": (
        lambda m: {"optimizer": ADAMW(m.parameters(), fused=True), "scaler": torch.amp.GradScaler("cpu")},
        "with a gradient scaler a fused update reads the scale too",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_recorded_is_refused(tmp_path, case):
    model = Model()
    make, message = REFUSED[case]
    with pytest.raises((UnsupportedError, SetupError), match=message):
        capture.enable(model, history=tmp_path, redo=True, **make(model))
    assert not (tmp_path / "runs").exists()


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, {}


def test_a_wrapper_that_writes_the_weights_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    wrapper = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    refused = pytest.raises(UnsupportedError, match="a Lookahead around the optimizer writes the weights too")
    with refused, pytest.warns(UserWarning, match="the Lookahead around the optimizer is not captured"):
        capture.enable(model, optimizer=wrapper.inner, history=tmp_path, redo=True)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}])
def test_embeddings_that_forward_writes_are_refused(tmp_path, options):
    model = torch.nn.Embedding(5, 3, **options)
    with pytest.raises(UnsupportedError, match="redo=True: the embedding"):
        capture.enable(model, optimizer=torch.optim.SGD(model.parameters()), history=tmp_path, redo=True)


def test_a_wrong_value_is_refused(tmp_path):
    with pytest.raises(SetupError, match="redo=1: give True or False"):
        train(tmp_path, redo=1)
