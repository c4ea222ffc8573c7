"""The digest of a batch names its content: equal for equal batches, another for every other one."""

import numpy as np
import pytest
import torch
from late_marks import LateMarks

import capture
from capture.loops.batch_digest import BatchDigests
from catalog.history import History
from catalog.lineage_batches import lineage_batches


def digest(*args, marks=None, **kwargs):
    digests = BatchDigests() if marks is None else BatchDigests(marks)
    digests.saw_forward(args, kwargs)
    found = digests.take()
    return None if found is None else found.hex()


TOKENS = torch.arange(4 * 33).reshape(4, 33)


@pytest.mark.parametrize(
    "other",
    [
        {"x": TOKENS.clone().index_fill_(0, torch.tensor([3]), 7)},
        {"x": TOKENS.int()},
        {"x": TOKENS.reshape(33, 4)},
        {"y": TOKENS},
        {"x": (TOKENS,)},
        {"x": TOKENS, "mask": torch.ones(4, 33, dtype=torch.bool)},
    ],
)
def test_another_content_dtype_shape_or_place_has_another_digest(other):
    assert digest(x=TOKENS) == digest(x=TOKENS.clone()) != digest(**other)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (5,), (3, 7)])
def test_every_dtype_is_read_to_its_last_bit(dtype, shape):
    batch = torch.zeros(shape, dtype=dtype)
    changed = batch.clone()
    changed.view(-1)[-1] = 1
    assert digest(batch) == digest(batch.clone()) != digest(changed)


def test_the_digest_is_of_the_values_and_not_of_their_layout():
    whole = torch.arange(40).reshape(4, 10)
    assert digest(whole[:, :-1]) == digest(whole[:, :-1].contiguous())
    assert digest(whole.t().contiguous().t()) == digest(whole)
    complex_batch = torch.randn(4, dtype=torch.complex64)
    assert digest(complex_batch.conj()) == digest(complex_batch.conj().resolve_conj()) != digest(complex_batch)


def test_the_order_of_micro_batches_counts():
    one, other = torch.zeros(3), torch.ones(3)
    assert digest({"a": one}, [other]) != digest({"a": other}, [one])
    both = BatchDigests()
    both.saw_forward((one,), {})
    both.saw_forward((other,), {})
    swapped = BatchDigests()
    swapped.saw_forward((other,), {})
    swapped.saw_forward((one,), {})
    assert both.take().hex() != swapped.take().hex()
    assert both.take() is None, "the next step has its own"


def test_large_tensors_are_sampled_evenly():
    images = torch.randn(64, 3, 64, 64)
    brighter = images * 1.01
    assert digest(images) == digest(images.clone()) != digest(brighter)
    assert digest(images.half()) != digest(images)


def test_a_device_computes_its_part_later():
    marks = LateMarks()
    digests = BatchDigests(marks)
    batch = torch.arange(100_000)
    digests.saw_forward((batch, {"mask": torch.ones(3)}), {})
    found = digests.take()
    again = BatchDigests(marks)
    again.saw_forward((batch, {"mask": torch.ones(3)}), {})
    batch[99_999] = 0
    third = BatchDigests(marks)
    third.saw_forward((batch, {"mask": torch.ones(3)}), {})
    assert found.hex() == again.take().hex() != third.take().hex()


def test_what_has_no_content_is_left_out():
    meta = torch.empty(3, device="meta")
    assert digest(meta, 3, "text", None, torch.empty(0), np.zeros(3), torch.nn.Parameter(torch.ones(2))) is None
    marks = LateMarks()
    marks.recording = True
    assert digest(torch.ones(3), marks=marks) is None

    def within_vmap(x):
        assert digest(x) is None
        return x

    torch.vmap(within_vmap)(torch.ones(3, 2))
    endless = []
    endless.append(endless)
    assert digest(endless) is None


@pytest.mark.parametrize("fingerprints", [True, False])
def test_every_step_keeps_the_digest_of_its_batch(tmp_path, fingerprints):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(4, 3) for _ in range(3)]
    with capture.enable(
        model, optimizer=optimizer, every=4, history=tmp_path / "h", fingerprints=fingerprints
    ) as session:
        for step in range(1, 7):
            model.eval()
            model(torch.randn(2, 3))
            model.train()
            with torch.no_grad():
                model(torch.randn(2, 3))
            for micro in range(2):
                model(batches[(step + micro) % 3]).square().mean().backward()
            optimizer.step()
        run = session.run
    kept = lineage_batches(History.open(tmp_path / "h").paths, run)
    if not fingerprints:
        assert kept == {}
        return
    assert {step: list(ranks) for step, ranks in kept.items()} == {step: [0] for step in range(1, 7)}
    assert {kept[step][0].reader for step in kept} == {"host"}
    digests = [kept[step][0].digest for step in range(1, 7)]
    assert digests[:3] == digests[3:]
    assert len(set(digests)) == 3
    expected = BatchDigests()
    expected.saw_forward((batches[1],), {})
    expected.saw_forward((batches[2],), {})
    assert digests[0] == expected.take().hex()
