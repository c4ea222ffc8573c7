"""A bisection by replays names the batch that brings a jump about, or the steps in which it arose otherwise."""

import re

import pytest
import torch

import capture
import dshistory
from catalog.errors import NotFoundError, SetupError

STEPS, EVERY, BAD = 24, 8, 19


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 6, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True) + 0.1 * torch.randn(16, 1, generator=generator)


def with_bad(*bad):
    """Return a function of the step whose batches of these steps throw the weights away."""

    def spoilt(step):
        inputs, targets = batch_of(step)
        return (inputs * 4, targets - 60) if step in bad else (inputs, targets)

    return spoilt


class Training:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(6, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.03)
        self.seen = []

    def parts(self, batches):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "dataloader": lambda step: self.seen.append(step) or batches(step),
            "train_step": self.step,
            "quiet": True,
        }

    def step(self, batch):
        loss = (self.model(batch[0]) - batch[1]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


def train(root, batches, *, edit_after=None):
    training = Training()
    with capture.enable(
        training.model, optimizer=training.optimizer, every=EVERY, history=root, stats_every=0
    ) as session:
        for step in range(1, STEPS + 1):
            session.log(loss=training.step(batches(step)))
            if step == edit_after:
                with session.modify(), torch.no_grad():
                    training.model.weight += 30.0
    return dshistory.Explorer.open(root)


@pytest.fixture(scope="module")
def jumped(tmp_path_factory):
    return train(tmp_path_factory.mktemp("jumped") / "history", with_bad(BAD))


def test_the_planted_batch_is_named_by_log2_replays(jumped):
    training = Training()
    found = jumped.bisect_replay(8, STEPS, **training.parts(with_bad(BAD)))
    assert found.steps == range(BAD, BAD + 1), found.note
    assert found.alone
    assert f"the batch of step {BAD} brings the jump about: without it alone the jump is gone" in found.note
    assert found["gone"].to_pylist()[:2] == [False, True], "nothing changed, and all left out"
    assert found["step"].to_pylist() == [8, 24, 16, 20, 18, 19, 19]
    assert found[-1]["changed"] == f"without the batches of {BAD}"
    assert all((row["highest_loss"] > 100) == (not row["gone"]) for row in found)
    facts = jumped.history.run_facts(found[3]["run"])
    assert facts.facts["replay"]["change"] == {"skip_batches": list(range(9, 21))}
    # The last replay left out that batch alone, and took one more at its end for it.
    assert training.seen[-16:] == [*range(9, BAD), *range(BAD + 1, STEPS + 2)]


@pytest.mark.long
def test_one_batch_at_a_time(jumped):
    found = jumped.bisect_replay(16, STEPS, linear=True, **Training().parts(with_bad(BAD)))
    assert found.steps == range(BAD, BAD + 1)
    assert found["step"].to_pylist() == [16, 17, 18, BAD]
    several = jumped.bisect_replay(16, 20, linear=True, **Training().parts(with_bad(18, BAD)))
    assert several.steps == range(0)
    assert "no batch of the steps 17-20 is alone to blame" in several.note


@pytest.mark.long
def test_of_several_bad_batches_the_last_is_named_and_said_not_to_be_alone(jumped):
    found = jumped.bisect_replay(16, 20, **Training().parts(with_bad(17, BAD)))
    assert (found.steps, found.alone) == (range(BAD, BAD + 1), False)
    assert f"the batch of step {BAD} is not alone to blame" in found.note


def test_a_jump_of_the_state_is_in_no_batch(jumped):
    found = jumped.bisect_replay(16, 20, predicate=lambda replayed: False, **Training().parts(batch_of))
    assert found.steps == range(0)
    assert "without any batch of the steps 17-20 the jump is there too" in found.note
    assert len(found) == 2


@pytest.mark.long
def test_a_jump_that_no_batch_made_does_not_come_again_and_redoing_names_the_steps(tmp_path):
    h = train(tmp_path / "history", batch_of, edit_after=18)
    again = h.bisect_replay(8, 22, **Training().parts(batch_of))
    assert again.steps == range(0)
    assert "does not come again" in again.note
    assert len(again) == 1
    for linear in (False, True):
        found = h.bisect_replay(8, STEPS, undo="redo", linear=linear, **Training().parts(batch_of))
        assert found.steps == range(17, STEPS + 1), found.note
        assert "by hardware, a race, an edit" in found.note
    later = h.bisect_replay(8, STEPS + 1, undo="redo", **Training().parts(batch_of))
    assert later.steps == range(17, STEPS + 1)
    assert later["gone"].to_pylist() == [True, True, False]


def test_a_jump_that_comes_again_is_not_undone_by_redoing(jumped):
    found = jumped.bisect_replay(8, STEPS, undo="redo", **Training().parts(with_bad(BAD)))
    assert found.steps == range(0)
    assert "comes again without a change" in found.note


@pytest.mark.long
def test_a_predicate_of_the_user_decides(jumped):
    found = jumped.bisect_replay(
        16,
        20,
        until=22,
        predicate=lambda replayed: replayed[-1]["loss"] < 50 and len(replayed) == 6,
        **Training().parts(with_bad(BAD)),
    )
    assert found.steps == range(BAD, BAD + 1)


@pytest.mark.parametrize(
    ("good", "bad", "options", "message"),
    [
        (16, 16, {}, "bad=16, until=16: these steps must follow each other"),
        (16, 20, {"until": 19}, "bad=20, until=19: these steps must follow each other"),
        (16, 20, {"predicate": "loss > 5"}, "predicate='loss > 5': give a function"),
        (0, 20, {}, "too few losses are recorded up to .*:0"),
        (16, 20, {"train_step": None}, "give what trains"),
        (
            16,
            20,
            {"predicate": lambda replayed: None},
            "the predicate gave None at the replay of .*:16, changed: nothing",
        ),
        (16, 20, {"predicate": lambda replayed: replayed[0]["x"]}, "failed at the replay of .*:16.*KeyError: 'x'"),
    ],
)
def test_what_does_not_fit_is_named(jumped, good, bad, options, message):
    with pytest.raises(SetupError, match=message):
        jumped.bisect_replay(good, bad, **Training().parts(batch_of) | options)


def test_where_the_run_has_no_jump_nothing_is_replayed(jumped):
    found = jumped.bisect_replay(8, 12, **Training().parts(batch_of))
    assert (list(found.steps), found.alone, len(found)) == ([], None, 0)
    assert re.search(
        r"no jump to look for between .*:8 and step 12: the highest loss is .* at step (9|1[0-2])", found.note
    )


def test_a_misspelt_way_has_a_nearest_one(jumped):
    with pytest.raises(NotFoundError, match="no undo='sikp'; the nearest is skip"):
        jumped.bisect_replay(16, 20, undo="sikp", **Training().parts(batch_of))
