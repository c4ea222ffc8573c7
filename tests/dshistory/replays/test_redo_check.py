"""The verbs take steps of a redo log, and say of each checkpoint whether its log makes it again."""

import pytest
import torch
from safetensors.torch import load_file

import capture
from catalog.errors import MismatchError, NotFoundError, SetupError
from dshistory.explorer import Explorer


def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.BatchNorm1d(12), torch.nn.Linear(12, 4))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a history with a redo log, the weights after each step, and the norms of the gradients that made it; the
    sixth was edited past all counters."""
    folder = tmp_path_factory.mktemp("redo")
    torch.manual_seed(0)
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    weights, norms = {}, {}
    options = {"every": 4, "history": folder, "redo": True, "fingerprints": False, "stats_every": 0}
    with capture.enable(trained, optimizer=optimizer, **options):
        for step in range(1, 13):
            trained(torch.randn(4, 8)).square().mean().backward()
            norms[step] = {name: float(one.grad.double().norm()) for name, one in trained.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            weights[step] = trained[0].weight.detach().clone()
            if step == 6:
                trained[2].bias.data.add_(1.0)
    return Explorer.open(folder), weights, norms


def test_a_tensor_of_every_step_is_read(trained):
    h, weights, _ = trained
    for step in (1, 3, 4, 10, 11):
        assert torch.equal(h.tensor("0.weight", step), weights[step])
    assert torch.equal(h.tensor("0.weight", f"{h.history.current_run()}:3"), weights[3])
    assert h.tensor("0.weight", 3, state="exp_avg").shape == (12, 8)
    assert set(h.restore(3, kinds=["buffer"])["buffer"]) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert h.tensor("1.num_batches_tracked", 3, state="buffer") == 3


def test_steps_of_a_redo_log_are_compared_like_checkpoints(trained):
    h, weights, _ = trained
    for a, b in ((1, 3), (3, 4), (4, 11), (8, 12)):
        rows = {row["name"]: row for row in h.diff(a, b, quiet=True)}
        expected = float((weights[b].double() - weights[a].double()).norm())
        assert rows["0.weight"]["update_norm"] == pytest.approx(expected, rel=1e-12)
        inside = h.diff(a, b, tensor="0.weight", quiet=True)
        assert sum(row["update_norm"] ** 2 for row in inside) == pytest.approx(expected**2, rel=1e-12)
    assert {row["status"] for row in h.diff(3, 3, kinds="*", quiet=True)} == {"same"}


def test_the_books_of_every_step_balance_but_where_something_else_wrote(trained):
    h, _, norms = trained
    for step in (2, 3, 4, 11):
        table = h.audit(step - 1, step, quiet=True)
        assert not len(table.unbalanced)
        assert {row["name"]: row["gradient_norm"] for row in table} == pytest.approx(norms[step], rel=1e-3)
    assert [row["gradient_norm"] for row in h.audit(b=11, quiet=True)] == [row["gradient_norm"] for row in table]
    # Made again, the steps behind the edit do not have it; the checkpoint after them has.
    assert [row["name"] for row in h.audit(7, 8, quiet=True).unbalanced] == ["2.bias"]
    assert [(row["since"], row["step"]) for row in h.audit_all(quiet=True)] == [(0, 4), (4, 8), (8, 12)]
    table = h.audit_all(redo=True, quiet=True)
    assert [(row["since"], row["step"]) for row in table] == [(step - 1, step) for step in range(1, 13)]
    assert {row["step"]: row["worst"] for row in table if row["unbalanced"]} == {8: "2.bias"}
    assert h.audit_all(redo=True, quiet=True).note.endswith("0 audited now")
    assert h.audit_all(quiet=True).note.endswith("0 audited now")
    stored = h.sql("SELECT step, any_value(since) AS since, count(*) AS n FROM audit GROUP BY step ORDER BY step")
    assert [(row["since"], row["step"], row["n"]) for row in stored] == [(step - 1, step, 6) for step in range(1, 13)]
    with pytest.raises(SetupError, match="did not come from"):
        h.audit(11, 3)


def test_the_log_counts_them(trained):
    h, *_ = trained
    verbs = "`restore`, `replay`, `tensor`, `diff`, `audit`, `export` and `evaluate`"
    assert f"4 checkpoints; and 9 redo steps between, which {verbs} take too" in repr(h.log())


def test_a_step_of_a_redo_log_is_exported_and_evaluated(trained, tmp_path):
    h, weights, _ = trained
    h.export(3, tmp_path / "three.safetensors", quiet=True)
    exported = load_file(tmp_path / "three.safetensors")
    assert torch.equal(exported["0.weight"], weights[3])
    assert exported["1.num_batches_tracked"] == 3
    options = {"model": model(), "name": "total", "quiet": True}
    values = h.evaluate(lambda model: model[0].weight.sum().item(), steps=[3, 4], **options)
    assert values["value"].to_pylist() == [float(weights[3].sum()), float(weights[4].sum())]
    stored = h.evaluate(lambda model: 0.0, steps=[3], **options)
    assert (stored["value"].to_pylist(), stored["computed"].to_pylist()) == ([float(weights[3].sum())], [False])


@pytest.mark.guards("A redo step has the bits of the training")
def test_a_checkpoint_that_its_log_does_not_make_is_named(trained):
    h, *_ = trained
    table = h.redo_check()
    assert [(row["since"], row["step"], row["identical"]) for row in table] == [
        (0, 4, True),
        (4, 8, False),
        (8, 12, True),
    ]
    assert "step 8 of run" in table[1]["reason"]
    assert "has other bits" in table[1]["reason"]
    assert "2 of 3 checkpoints come out of their redo log bit for bit" in repr(table)


def test_a_step_that_no_log_has_is_refused_as_before(trained):
    h, *_ = trained
    with pytest.raises(NotFoundError, match=r"step 13 was not captured .*: the nearest is 12"):
        h.tensor("0.weight", 13)
    with pytest.raises(NotFoundError, match="step 3000 was not captured"):
        h.diff(3000, 4)


def test_a_log_of_another_optimizer_is_refused(trained, monkeypatch):
    h, *_ = trained
    monkeypatch.setattr("capture.redo.updates.known_optimizer", lambda _: torch.optim.SGD)
    with pytest.raises(MismatchError, match=r"the optimizer of .*:0 is a torch\..*AdamW, that of the redo log a SGD"):
        h.tensor("0.weight", 1)
