"""Low-precision weights that are their masters, rounded, are not stored, and every reader finds their bits."""

import errno
import itertools
import re
import threading
import time

import pytest
import torch
from capture_helpers import assert_same, bits, reference
from mixed_precision import MixedAdam, OtherRounding, captured_mixed, codecs, known, mixed, train_mixed, update_mixed

import capture
import dshistory
import native
from capture.snapshot.snapshot import Snapshot
from catalog.compaction.pack import bases_in
from catalog.data_files import check_data
from catalog.errors import CorruptError
from catalog.history import History
from catalog.read.checkpoint import read_checkpoint
from catalog.records import CheckpointRef
from catalog.verify import verify

WIDTH = 64
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
NAN = {"BF16": 0x7FC0, "F16": 0x7E00}


def numbers() -> torch.Tensor:
    """Every upper half of a float32, each with lower halves around the ties: denormals, infinities and NaN are among
    them."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xE000, 0xFFFF])
    words = (upper[:, None] | lower).flatten()
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_rounded_as_torch_does_it(dtype):
    found, expected = torch.empty(len(numbers()), dtype=DTYPES[dtype]), numbers().to(DTYPES[dtype])
    native.round_memory(address=numbers().data_ptr(), target=found.data_ptr(), numel=0, dtype=dtype)
    masters = numbers()
    native.round_memory(address=masters.data_ptr(), target=found.data_ptr(), numel=len(found), dtype=dtype)
    nan = masters.isnan()
    assert torch.equal(found.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])
    assert set(found.view(torch.int16)[nan].tolist()) == {NAN[dtype]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 1023, 1025, (256 << 10) // 4, (256 << 10) // 4 * 2 + 7])
def test_a_weight_is_compared_to_its_last_bit(dtype, numel):
    masters = torch.randn(numel)
    weights = masters.to(DTYPES[dtype])

    def same(pieces):
        comparison = native.RoundedComparison(dtype)
        for begin, end in itertools.pairwise(pieces):
            places = {"masters": masters[begin:].data_ptr(), "weights": weights[begin:].data_ptr()}
            if not comparison.add(**places, numel=end - begin):
                return None
        return comparison.end()

    both = tuple(native.checksum(tensor.view(torch.uint8).numpy()) for tensor in (weights, masters))
    for pieces in ([0, numel], [0, numel // 3, numel // 2, numel]):
        assert same(pieces) == both
        for at in (0, numel // 2, numel - 1):
            weights.view(torch.int16)[at] ^= 1
            assert same(pieces) is None
            weights.view(torch.int16)[at] ^= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 2048, 2049, 100_000])
def test_a_sample_has_the_first_and_the_last_element_and_all_of_a_short_weight(dtype, numel):
    masters = torch.randn(2, numel)
    weights = masters.to(DTYPES[dtype])

    def found():
        rows = [torch.tensor([one.data_ptr() for one in two]).numpy().astype("uint64") for two in (masters, weights)]
        each = torch.tensor([numel, numel]).numpy().astype("uint64")
        return list(native.samples_are_rounded(masters=rows[0], weights=rows[1], numel=each, dtype=dtype))

    assert found() == [1, 1]
    for at in range(numel) if numel == 2048 else {0, numel - 1} if numel else ():
        weights.view(torch.int16)[1, at] ^= 1
        assert found() == [1, 0], at
        weights.view(torch.int16)[1, at] ^= 1


def test_memory_that_is_gone_is_an_error_and_not_the_end_of_the_process():
    with pytest.raises(OSError, match="no longer mapped") as caught:
        native.RoundedComparison("BF16").add(masters=4096, weights=4096, numel=1)
    assert caught.value.errno == errno.EFAULT
    with pytest.raises(ValueError, match="BF16 or F16"):
        native.RoundedComparison("F32")
    page = torch.tensor([4096]).numpy().astype("uint64")
    # The comparison says so, in the thread whose errors fail the snapshot by name.
    assert native.samples_are_rounded(masters=page, weights=page, numel=page, dtype="BF16") == b"\x01"


@pytest.mark.guards("A checkpoint holds one step")
def test_the_barrier_waits_until_weights_and_masters_are_compared(history, monkeypatch):
    compared = []

    class Late(native.RoundedComparison):
        def add(self, **where):
            time.sleep(0.2)
            compared.append(where)
            return super().add(**where)

    monkeypatch.setattr(native, "RoundedComparison", Late)
    model, optimizer = mixed(WIDTH, torch.bfloat16)
    session = capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0)
    expected = {}
    for _ in range(2):
        update_mixed(model, optimizer)
        expected[session.snapshot()] = known(reference(model, optimizer))
    session.close()
    assert not session.failures
    assert len(compared) == 3 * len(list(model.parameters()))
    assert verify(History.open(history)) == []
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history), state)


@pytest.mark.guards("A checkpoint holds one step")
def test_a_master_that_is_stored_otherwise_than_it_was_compared_fails_the_snapshot(history, monkeypatch):
    """A write that nobody sees falls between the comparison and the writing: the weights' bytes would be nowhere."""

    class Other(native.RoundedComparison):
        def end(self):
            return super().end()[0], native.checksum(b"other numbers")

    monkeypatch.setattr(native, "RoundedComparison", Other)
    model, optimizer = mixed(WIDTH, torch.bfloat16)
    session = capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0)
    update_mixed(model, optimizer)
    session.snapshot()
    with pytest.warns(UserWarning, match=r"master_param .*written to after the step while it was being read"):
        session.close()
    assert session.failures


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_their_masters_are_not_stored_and_every_step_is_restored_bit_for_bit(history, dtype):
    expected = captured_mixed(history, DTYPES[dtype], stats_every=1)
    assert verify(History.open(history)) == []
    for ref, state in expected.items():
        assert_same(capture.restore(ref, history=history), state)
        assert bits(capture.restore(ref, history=history, kinds=["model"])["model"]["0.weight"]) == bits(
            state["model"]["0.weight"]
        )
    how = codecs(history)
    assert {how[key] for key in how if key[1] == "model"} == {"rounded"}
    assert {how[key] for key in how if key[1] != "model"} == {"raw"}


def test_twelve_bytes_a_parameter_are_written(history, figure):
    expected = captured_mixed(history, torch.bfloat16, width=512, steps=2)
    (ref, state) = list(expected.items())[-1]
    run, step = ref.split(":")
    (part,) = History.open(history).marker(CheckpointRef(run, int(step))).parts
    each = part.data_bytes / sum(tensor.numel() for tensor in state["model"].values())
    figure("bytes a parameter", each)
    assert each == pytest.approx(12, rel=0.02)


@pytest.mark.parametrize(("edits", "stored"), [(1, {2}), (2, {2, 3, 4, 5})])
def test_a_weight_that_is_not_its_master_is_stored_and_one_that_seldom_is_has_a_place(history, edits, stored):
    model, optimizer = mixed(WIDTH, torch.bfloat16)
    session = capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0)
    expected = train_mixed(model, optimizer, session, 1)
    for _ in range(edits):
        update_mixed(model, optimizer)
        with session.modify():
            model[0].weight.data.view(torch.int16).view(-1)[-1] ^= 1
        expected[session.snapshot()] = known(reference(model, optimizer))
        session.wait()
    expected |= train_mixed(model, optimizer, session, 4 - edits)
    session.close()
    assert not session.failures
    how = codecs(history)
    assert {step for step in range(6) if how[step, "model", "0.weight"] == "raw"} == stored
    assert {how[key] for key in how if key[1:] in (("model", "0.bias"), ("model", "1.weight"))} == {"rounded"}
    assert verify(History.open(history)) == []
    # Packed too: the stored weights of a step have no base in a key frame that has none stored.
    for packed in (False, True):
        if packed:
            dshistory.open(str(history)).compact(newest=0, quiet=True)
            assert not list(history.rglob("rank-*.safetensors"))
        for step, state in expected.items():
            assert_same(capture.restore(f"{session.run}:{step}", history=history), state)


def test_weights_that_are_rounded_otherwise_are_not_compared_and_seldom_sampled(history, monkeypatch):
    """A sample at the step tells that stochastic rounding is at work: nothing is tried, and nothing written late."""
    sampled, compared = [], []

    class Counted(native.RoundedComparison):
        def __init__(self, dtype):
            compared.append(dtype)
            super().__init__(dtype)

    def counted(*, real=native.samples_are_rounded, **where):
        sampled.append(len(where["numel"]))
        return real(**where)

    monkeypatch.setattr(native, "RoundedComparison", Counted)
    monkeypatch.setattr(native, "samples_are_rounded", counted)
    model, _ = mixed(WIDTH, torch.bfloat16)
    optimizer = OtherRounding(model.parameters())
    session = capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0)
    session.wait()
    expected = train_mixed(model, optimizer, session, 16)
    assert not compared
    assert sampled == [4] * 4, "at the first two snapshots with other bits, then after 4 and 8 others"
    optimizer.rounds_otherwise = False
    expected |= train_mixed(model, optimizer, session, 16)
    session.close()
    assert not session.failures
    how = codecs(history)
    weights = [name for name, _ in model.named_parameters()]
    assert {how[step, "model", name] for step in range(17) for name in weights} == {"raw"}
    assert {how[32, "model", name] for name in weights} == {"rounded"}, "tried again, and found"
    assert verify(History.open(history)) == []
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history), state)


def test_a_weight_that_differs_where_no_sample_looks_is_compared_less_and_less(history, monkeypatch):
    compared = []

    class Counted(native.RoundedComparison):
        def add(self, **where):
            same = super().add(**where)
            compared.append(same)
            return same

    monkeypatch.setattr(native, "RoundedComparison", Counted)
    model, optimizer = mixed(256, torch.bfloat16)
    session = capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0)
    session.wait()
    for _ in range(15):
        update_mixed(model, optimizer)
        with session.modify():
            model[0].weight.data.view(torch.int16).view(-1)[100] ^= 1
        session.snapshot()
        session.wait()
    session.close()
    assert not session.failures
    assert compared.count(False) == 4, "twice in a row, then after 4 and 8 other snapshots"


def test_a_dropped_snapshot_waits_for_one_piece_of_the_comparison(history, monkeypatch):
    started, pieces, stopping = threading.Event(), [], []

    class Counted(native.RoundedComparison):
        def add(self, **where):
            pieces.append(where["numel"])
            started.wait(60)
            if len(pieces) == 1:
                stopping[0].wait(10)
            return super().add(**where)

    model, optimizer = mixed(2048, torch.bfloat16)
    session = capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0)
    session.wait()
    monkeypatch.setattr(native, "RoundedComparison", Counted)

    def start(*args, real=Snapshot.start, **options):
        snapshot = real(*args, **options)
        stopping.append(snapshot.derived._stopping)
        started.set()
        return snapshot

    monkeypatch.setattr(Snapshot, "start", start)
    update_mixed(model, optimizer)
    with session.modify():
        dropped = len(pieces)
    session.close()
    assert not session.failures
    assert dropped == 1
    assert sum(pieces[1:]) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_numbers_come_back_bit_for_bit_stored_or_not(history, dtype):
    """NaN of every kind, infinities, denormals and -0.0: what this rounding gives is derived, other bits are stored."""
    model = torch.nn.Linear(8, 64, bias=False).to(DTYPES[dtype])
    other = torch.nn.Linear(8, 64, bias=False).to(DTYPES[dtype])
    both = torch.nn.ModuleList([model, other])
    optimizer = MixedAdam(both.parameters())
    special = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, -6e-8, 65520.0, 3.4e38]
    with torch.no_grad():
        for one in both:
            masters = optimizer.state[one.weight]["master_param"]
            masters[::7] = torch.tensor(special)
            one.weight.copy_(masters)
            one.weight.view(torch.int16)[masters.isnan()] = NAN[dtype]
        other.weight.view(torch.int16)[0, 0] += 1
    session = capture.enable(both, optimizer=optimizer, history=history, every=1, stats_every=0)
    session.close()
    assert not session.failures
    assert_same(capture.restore(0, history=history), known(reference(both, optimizer)))
    how = codecs(history)
    assert (how[0, "model", "0.weight"], how[0, "model", "1.weight"]) == ("rounded", "raw")
    assert verify(History.open(history)) == []


def test_masters_are_read_once_for_the_weights_too_where_both_are_larger_than_a_batch(history, monkeypatch):
    (ref, *_) = captured_mixed(history, torch.bfloat16, steps=1)
    opened, read = History.open(history), []

    def counted(*files, real=native.read, **requests):
        read.append(int(requests["nbytes"].sum()))
        return real(*files, **requests)

    monkeypatch.setattr(native, "read", counted)
    monkeypatch.setattr(check_data, "BATCH_BYTES", 20_000)
    checkpoint = opened.resolve(ref)
    assert verify(opened, [checkpoint]) == []
    rows = opened.extents(checkpoint)
    assert max(row.nbytes for row in rows) < 20_000 < max(row.nbytes for row in rows) * 3 / 2
    assert sum(read) == sum(part.data_bytes for part in opened.marker(checkpoint).parts)


@pytest.mark.guards("Damage is found and named")
def test_a_flipped_bit_in_a_master_is_found_under_both_names(history):
    ref = list(captured_mixed(history, torch.bfloat16))[-1]
    opened = History.open(history)
    master = "SELECT file, \"offset\" FROM fragments WHERE kind = 'master_param' AND name = '0.weight' AND step = 3"
    (row,) = opened.query(master).to_pylist()
    path = history / row["file"]
    data = bytearray(path.read_bytes())
    data[row["offset"] + 4 * 100 + 3] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    assert {problem.field for problem in verify(opened)} == {
        "checksum of master_param/0.weight",
        "checksum of model/0.weight",
    }
    with pytest.raises(CorruptError, match=re.escape("0.weight")):
        capture.restore(ref, history=history)
    path.unlink()
    with pytest.raises(CorruptError, match=re.escape(row["file"])):
        capture.restore(ref, history=history)


def test_readers_compaction_and_retention_know_nothing_of_it(history):
    """One layer's masters rest, so that its weights are derived from an earlier step's file, which must stay."""
    model, optimizer = mixed(256, torch.bfloat16)
    model[0].requires_grad_(False)
    session = capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0)
    session.wait()
    expected = train_mixed(model, optimizer, session, 4)
    session.close()
    assert not session.failures
    opened = History.open(history)
    rows = opened.query('SELECT kind, name, codec, file, "offset" FROM fragments WHERE step = 4').to_pylist()
    places = {(row["kind"], row["name"]): (row["file"], row["offset"]) for row in rows}
    assert places["model", "0.weight"] == places["master_param", "0.weight"]
    assert "/000000000004/" not in places["model", "0.weight"][0], "written anew: the test shows nothing"
    assert {row["codec"] for row in rows if row["kind"] == "model"} == {"rounded"}

    explorer = dshistory.open(str(history))
    assert bits(explorer.tensor("1.weight", 4)) == bits(expected[4]["model"]["1.weight"])
    changed = [row["name"] for row in explorer.diff(3, 4, kinds=["model"], quiet=True) if row["status"] == "changed"]
    assert sorted(changed) == ["1.bias", "1.weight"]
    explorer.analyze(quiet=True)
    found = opened.query("SELECT name, sum FROM statistics WHERE step = 4 AND kind = 'model'").to_pylist()
    assert {row["name"] for row in found} == expected[4]["model"].keys()
    for row in found:
        assert row["sum"] == pytest.approx(float(expected[4]["model"][row["name"]].double().sum()), rel=1e-9)
    kinds = {row["kind"]: row for row in explorer.usage().tables["kinds"]}
    weights = sum(tensor.nbytes for tensor in expected[4]["model"].values())
    assert [kinds["model"][column] for column in ("bytes", "referred", "derived")] == [0, 0, 5 * weights]
    assert kinds["master_param"]["referred"] > 0
    assert kinds["master_param"]["derived"] == 0
    (row,) = (row for row in explorer.show(4).tables["kinds"] if row["kind"] == "model")
    assert (row["bytes"], row["derived"]) == (0, weights)
    checked = []
    assert verify(opened, [CheckpointRef(session.run, 0)], progress=checked.append) == []
    assert sum(checked) == sum(part.data_bytes for part in opened.marker(CheckpointRef(session.run, 0)).parts)
    (manifest,) = read_checkpoint(opened.paths, session.run, 4).manifests
    bases = bases_in(manifest, files=frozenset(manifest.table["file"].to_pylist()))
    assert bases
    assert not any(extent.is_rounded for extent in bases.values())
    assert len(explorer.prune("last 1", dry_run=False)) > 0
    explorer.compact(newest=0, quiet=True)
    assert not list(history.rglob("rank-*.safetensors"))
    assert verify(opened) == []
    assert_same(capture.restore(f"{session.run}:4", history=history), expected[4])
    assert bits(dshistory.open(str(history)).tensor("0.weight", 4)) == bits(expected[4]["model"]["0.weight"])
