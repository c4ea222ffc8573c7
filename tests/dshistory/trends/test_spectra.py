"""Spectra are those of torch's own decomposition, whichever side is the smaller one, and say what they do not know."""

import math

import pytest
import torch
from explorer_helpers import Run, whole

from catalog.errors import SetupError
from dshistory.explorer import Explorer
from dshistory.trends import spectra


@pytest.fixture
def explorer(tmp_path):
    run = Run(tmp_path)
    generator = torch.Generator().manual_seed(0)
    tall, bias = torch.randn(40, 12, generator=generator), torch.ones(12)
    for step in (1, 2):
        weights = {"tall": tall * step, "wide": tall.T.bfloat16(), "one": torch.outer(torch.ones(5), torch.ones(7))}
        weights |= {"eye": torch.eye(8), "filter": tall.reshape(40, 3, 2, 2), "bias": bias, "zero": torch.zeros(3, 3)}
        weights["broken"] = torch.full((2, 2), math.nan)
        run.checkpoint(step, whole(weights))
    run.close()
    return Explorer.open(tmp_path)


def test_they_are_those_of_an_exact_decomposition(explorer):
    rows = {row["name"]: row for row in explorer.spectra(top=3, quiet=True)}
    assert set(rows) == {"tall", "wide", "one", "eye", "filter", "zero", "broken"}, "a vector has none"
    tall = explorer.tensor("tall", 2).double()
    exact = torch.linalg.svdvals(tall)
    assert rows["tall"]["singular_values"] == pytest.approx(exact[:3].tolist())
    assert rows["tall"]["stable_rank"] == pytest.approx(float(tall.square().sum() / exact[0] ** 2))
    shares = exact / exact.sum()
    assert rows["tall"]["effective_rank"] == pytest.approx(math.exp(-float((shares * shares.log()).sum())))
    wide = torch.linalg.svdvals(explorer.tensor("wide", 2).double())
    assert rows["wide"]["singular_values"] == pytest.approx(wide[:3].tolist())
    assert (rows["filter"]["rows"], rows["filter"]["columns"]) == (40, 12)
    assert rows["filter"]["stable_rank"] == pytest.approx(rows["tall"]["stable_rank"])
    assert rows["one"]["stable_rank"] == pytest.approx(1.0)
    assert rows["one"]["effective_rank"] == pytest.approx(1.0, abs=1e-5)
    assert rows["eye"]["effective_rank"] == pytest.approx(8.0)
    assert rows["zero"]["largest"] == 0
    assert rows["zero"]["stable_rank"] is None
    assert rows["broken"]["largest"] is None


def test_a_matrix_too_large_for_its_gram_matrix_is_projected(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(300, 60, generator=generator))[0] for _ in range(2))
    matrix = left @ torch.diag(0.5 ** torch.arange(60.0)) @ right.T
    exact, squares = spectra.singular_values(matrix, top=5)
    monkeypatch.setattr(spectra, "_MOST_SIDE", 100)
    state = torch.get_rng_state()
    largest, same = spectra.singular_values(matrix, top=5)
    assert len(largest) == 5
    assert largest.tolist() == pytest.approx(exact[:5].tolist(), rel=1e-4)
    assert same == pytest.approx(squares)
    assert torch.equal(torch.get_rng_state(), state), "a look draws nothing from the training's numbers"


def test_they_are_plotted_over_the_steps(explorer):
    table = explorer.spectra(steps=None, names="tall", quiet=True)
    assert [row["step"] for row in table] == [1, 2]
    (line,) = table.plot("largest").data
    assert list(line.x) == [1, 2]
    assert line.y[1] == pytest.approx(2 * line.y[0])
    with pytest.raises(SetupError, match="figure='height': give one of stable_rank, effective_rank, largest"):
        table.plot("height")
    with pytest.raises(SetupError, match="top=0"):
        explorer.spectra(top=0)
