"""A history of weights alone has their bits, rounded where that is asked for, and nothing goes on from it."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from capture_helpers import MIB, bits, faulty_session, make, one_step
from late_device import LateDevice, late_until_the_barrier, session_on, small_writer

import capture
import dshistory
import native
from capture.devices.rounding import RoundedPart
from capture.snapshot.snapshot import Snapshot
from capture.state.interface import TensorItem
from capture.state.weights_only import weights_of
from catalog.errors import MismatchError, SetupError, SnapshotError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.verify import verify

WIDTH = 320
"""The matrices have 400 KiB, several blocks of the simulated device's writer."""

DTYPES = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def weights(model: torch.nn.Module, dtype: str | None) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().to(DTYPES[dtype]).clone() for name, parameter in model.named_parameters()}


def buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bits(found[name]) == bits(tensor), name


def captured(root: Path, *, steps: int = 3, **options: object):
    """Capture every step of a training; return the model, the optimizer, the run and the expected tensors by step."""
    model, optimizer = make(WIDTH)
    options = {"every": 1, "what": "weights", "budget_bytes": 8 * MIB, "stats_every": 0, **options}
    session = capture.enable(model, optimizer=optimizer, history=root, **options)
    dtype = options.get("dtype")
    expected = {0: (weights(model, dtype), buffers(model))}
    for step in range(1, steps + 1):
        one_step(model, optimizer)
        expected[step] = weights(model, dtype), buffers(model)
    session.close()
    assert not session.failures
    return model, optimizer, session, expected


@pytest.mark.parametrize("backend", ["posix", None])
@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_every_step_has_the_bits_of_its_weights_and_buffers_and_no_more(history, dtype, backend):
    model, _, session, expected = captured(history, dtype=dtype, backend=backend)
    assert verify(History.open(history)) == []
    for step, (model_, buffer) in expected.items():
        found = capture.restore(f"{session.run}:{step}", history=history)
        assert found.keys() == {"model", "buffer"}
        assert_same(found["model"], model_)
        assert_same(found["buffer"], buffer)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters()), "the live weights were rounded"
    facts = json.loads((history / "runs" / session.run / "run.json").read_bytes())["facts"]
    assert (facts["what"], facts["dtype"]) == ("weights", dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_special_values_are_rounded_as_torch_does(history, dtype):
    """Ties, NaN, infinities, subnormals, and what overflows."""
    model = torch.nn.Linear(8, 1 << 12, bias=False)
    with torch.no_grad():
        words = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 12, 8), dtype=torch.int32)
        model.weight.copy_(words.view(torch.float32))
        model.weight[0] = torch.tensor(
            [1.00390625, 1.01171875, 65520.0, -1e-40, float("inf"), float("nan"), 3e38, -0.0]
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture.enable(model, optimizer=optimizer, history=history, what="weights", dtype=dtype):
        pass
    found = capture.restore(0, history=history)["model"]["weight"]
    assert bits(found) == bits(model.weight.detach().to(DTYPES[dtype]))


def test_the_size_is_what_it_should_be(history, tmp_path):
    """4 bytes a parameter, 2 when rounded, and 12 with the state."""
    sizes = {}
    for name, options in (
        ("state", {"what": "state"}),
        ("fp32", {}),
        ("bf16", {"dtype": "bf16"}),
    ):
        model, _, session, _ = captured(tmp_path / name, steps=2, **options)
        (part,) = History.open(tmp_path / name).marker(CheckpointRef(session.run, 2)).parts
        sizes[name] = part.data_bytes / sum(parameter.numel() for parameter in model.parameters())
    assert sizes["bf16"] == pytest.approx(2, rel=0.03)
    assert sizes["fp32"] == pytest.approx(4, rel=0.03)
    assert sizes["state"] == pytest.approx(12, rel=0.03)


def test_unchanged_weights_are_referred_to_although_they_are_rounded(history):
    model, _ = make(WIDTH)
    model.inner.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    session = capture.enable(model, optimizer=optimizer, history=history, every=1, what="weights", dtype="bf16")
    for _ in range(5):
        one_step(model, optimizer)
        session.wait()
    assert session.stats.unchanged_bytes >= 3 * 2 * WIDTH * WIDTH
    # An undeclared edit that changes what the copy rounds to: it is found, written anew, and exact.
    one_step(model, optimizer)
    with session.modify():
        model.inner.weight.data.view(-1)[7] += 1.0
    expected = weights(model, "bf16")
    session.close()
    assert not session.failures
    assert_same(capture.restore("latest", history=history)["model"], expected)
    assert verify(History.open(history)) == []


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_state_on_a_device_is_rounded_there(history, monkeypatch, dtype):
    model, optimizer = make(WIDTH)
    device = LateDevice(lambda tensor: tensor.numel() > WIDTH)
    late_until_the_barrier(device, monkeypatch)
    session = session_on(
        device, model, optimizer, history, writer=small_writer(budget_bytes=4 * MIB), what="weights", dtype=dtype
    )
    expected = {0: weights(model, dtype)}
    for step in range(1, 4):
        one_step(model, optimizer)
        expected[step] = weights(model, dtype)
    device.ending = True
    device.gate.set()
    session.close()
    assert not session.failures
    assert device.copies
    for step, model_ in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history)["model"], model_)


@pytest.mark.parametrize("numel", [1, (1 << 20) - 1, 1 << 20, (2 << 20) + 3])
def test_what_is_rounded_piece_by_piece_is_what_torch_rounds_at_once(numel):
    live = torch.randn(numel)
    rounded = live.to(torch.bfloat16)
    part = RoundedPart(live.data_ptr(), numel, torch.float32, torch.bfloat16)
    assert b"".join(piece.numpy().tobytes() for piece in part.pieces()) == bits(rounded)
    assert part.checksum() == native.checksum(bits(rounded))
    end = torch.empty(2 * (numel // 2), dtype=torch.uint8)
    part.round_into(end, begin=part.nbytes - end.nbytes)
    assert end.numpy().tobytes() == bits(rounded)[part.nbytes - end.nbytes :]


class TestTheLiveMemoryIsGuarded:
    """The same promises as for a whole state: what is rounded later is what the step left, or the snapshot fails."""

    @pytest.mark.filterwarnings("ignore:the snapshot")
    @pytest.mark.parametrize("edit", ["counted", "uncounted", "freed"])
    def test_an_edit_while_it_is_read_fails_the_snapshot_by_name(self, history, edit, monkeypatch):
        model, optimizer = make(WIDTH)
        session = capture.enable(model, optimizer=optimizer, history=history, every=1, what="weights", dtype="bf16")
        session.wait()
        one_step(model, optimizer)
        kept = model.inner.weight.detach().clone()
        if edit == "counted":
            with torch.no_grad():
                model.inner.weight.mul_(2)
        elif edit == "uncounted":
            model.inner.weight.data.mul_(2)
        else:
            model.inner.weight.untyped_storage().resize_(0)
        with pytest.raises(SnapshotError, match=r"inner\.weight"):
            session.wait()
        if edit == "freed":
            model.inner.weight.untyped_storage().resize_(kept.nbytes)
            model.inner.weight.data.copy_(kept)
        one_step(model, optimizer)
        session.wait()
        expected = weights(model, "bf16")
        session.close()
        assert_same(capture.restore(2, history=history)["model"], expected)

    def test_without_the_barrier_it_is_torn(self, history, monkeypatch):
        """The proof that the barrier is what keeps a step whole: the rounding happens beside the training."""
        monkeypatch.setattr(Snapshot, "release", lambda snapshot: None)
        monkeypatch.setattr(Snapshot, "_require_unchanged", lambda snapshot: None)
        model, optimizer = make(2000)
        options = {"what": "weights", "dtype": "bf16", "budget_bytes": 2 * MIB}
        # A slow disk: the feeder waits for staging memory when the training goes on.
        session = faulty_session(model, optimizer, history, faults=native.Faults(delay_us=50_000), **options)
        expected = weights(model, "bf16")
        for parameter in model.parameters():
            parameter.data.add_(1.0)
        session.close()
        found = capture.restore(0, history=history)
        assert any(bits(found["model"][name]) != bits(tensor) for name, tensor in expected.items())


class TestNothingGoesOnFromIt:
    SAID = r"holds weights only, rounded to bf16, without optimizer state.*what=\"state\""

    def test_a_restore_into_a_training_is_refused(self, history):
        model, optimizer, *_ = captured(history, dtype="bf16", steps=1)
        before = weights(model, None)
        with pytest.raises(MismatchError, match=self.SAID):
            capture.restore(1, history=history, model=model, optimizer=optimizer)
        assert_same(weights(model, None), before)

    def test_a_resume_is_refused(self, history):
        model, optimizer, *_ = captured(history, dtype="bf16", steps=1)
        with pytest.raises(MismatchError, match=self.SAID):
            capture.enable(model, optimizer=optimizer, history=history, resume="auto")
        assert len(History.open(history).runs()) == 1

    def test_a_replay_is_refused_before_anything_is_started(self, history):
        model, optimizer, *_ = captured(history, dtype="bf16", steps=1)
        with pytest.raises(MismatchError, match=self.SAID):
            dshistory.open(history).replay(0, until=1, command=["false"])
        with pytest.raises(MismatchError, match=self.SAID):
            dshistory.open(history).replay(0, until=1, model=model, optimizer=optimizer, train_step=lambda batch: None)

    def test_weights_as_they_are_go_into_a_bare_model(self, history):
        *_, expected = captured(history, steps=1)
        fresh, _ = make(WIDTH, seed=9)
        capture.restore(1, history=history, model=fresh)
        assert_same(weights(fresh, None), expected[1][0])


def test_questions_are_answered(history, tmp_path):
    *_, expected = captured(history, dtype="bf16")
    h = dshistory.open(history)
    h.analyze()
    assert len(h.log()) == 4
    assert set(pa.table(h.diff(0, 3)).column("kind").to_pylist()) == {"model"}
    assert "norm.running_mean" in str(h.diff(0, 3, kinds="buffer"))
    assert len(h.layers(metric="norm"))
    assert len(h.trajectory("*.weight", metric="norm"))
    assert bits(h.tensor("inner.weight", 3)) == bits(expected[3][0]["inner.weight"])
    assert h.restore(3)["model"].keys() == expected[3][0].keys()
    h.export(3, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").stat().st_size
    assert h.show(3).facts["holds"] == "weights only, rounded to bf16"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"what": "model"}, 'what=\'model\': give "state", or "weights"'),
        ({"what": "weights", "dtype": "int8"}, 'dtype=\'int8\': give "bf16", "fp16", or None'),
        ({"what": "weights", "dtype": torch.bfloat16}, 'dtype=torch.bfloat16: give "bf16"'),
        ({"dtype": "bf16"}, "dtype='bf16': a training can't go on from rounded weights: give what=\"weights\" too"),
        ({"what": "weights", "providers": [capture.Stateful("ema", {})]}, 'what="weights": providers= can\'t be'),
        ({"what": "weights", "dataloader": []}, 'what="weights": dataloader= can\'t be captured'),
    ],
)
def test_what_can_not_be_is_refused_with_the_choices(history, given, said):
    model, optimizer = make()
    with pytest.raises(SetupError, match=said):
        capture.enable(model, optimizer=optimizer, history=history, **given)
    assert not history.exists()


def test_only_wide_parameters_are_rounded():
    """A parameter of 16 bits or fewer keeps its range and bits, and a buffer always does."""
    model = torch.nn.BatchNorm1d(4)
    model.weight.data = model.weight.data.to(torch.bfloat16)
    model.register_parameter("wide", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))
    loop_providers = capture.loops.select.loop_for(model, optimizer=torch.optim.SGD(model.parameters())).providers()
    items: list[TensorItem] = [item for one in weights_of(loop_providers, "fp16") for item in one.tensors()]
    assert {item.name: item.stored_dtype for item in items} == {
        "weight": torch.bfloat16,
        "bias": torch.float16,
        "wide": torch.float16,
        "running_mean": torch.float32,
        "running_var": torch.float32,
        "num_batches_tracked": torch.int64,
    }
