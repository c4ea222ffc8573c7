"""The order of a diff on a real transformer is one that a person would make: what was planted first, noise last."""

import math
from pathlib import Path

import pytest
import torch
from explorer_helpers import history_of, whole

import capture
import dshistory
from dshistory.explorer import Explorer

WIDTH, BLOCKS = 32, 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.ln1(x)
        x = x + self.out(torch.nn.functional.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h)))
        return x + self.down(torch.nn.functional.gelu(self.up(self.ln2(x))))


class Transformer(torch.nn.Module):
    """Small, with biases that are born at zero, among them those of keys, which no softmax feels."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(50, WIDTH), torch.nn.Embedding(16, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 50, bias=False)
        for module in self.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                torch.nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, torch.nn.Linear) and module.bias is not None:
                torch.nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


@pytest.fixture(scope="module", params=["adam", "sgd"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    """Return the history of 25 steps, every fifth captured: up to 15 nothing happens; up to 20 block 2 trains ten times
    as fast; after 20 a matrix of block 1 is replaced."""
    root = tmp_path_factory.mktemp("ranking") / "history"
    torch.manual_seed(0)
    model = Transformer()
    fast = list(model.blocks[2].parameters())
    others = [parameter for parameter in model.parameters() if not any(parameter is one for one in fast)]
    groups = [{"params": others}, {"params": fast}]
    adam, sgd = (lambda: torch.optim.AdamW(groups, lr=1e-3)), (lambda: torch.optim.SGD(groups, lr=0.2, momentum=0.9))
    optimizer = adam() if request.param == "adam" else sgd()
    data = torch.arange(64)[:, None].add(torch.arange(16) * 7).remainder(50)
    rate = optimizer.param_groups[1]["lr"]
    with capture.enable(model, optimizer=optimizer, every=5, history=root, stats_every=0) as session:
        for step in range(1, 26):
            optimizer.param_groups[1]["lr"] = rate * (10 if 15 < step <= 20 else 1)
            if step == 22:
                with session.modify(), torch.no_grad():
                    model.blocks[1].up.weight.normal_(std=0.05)
            optimizer.zero_grad()
            model(data[torch.randint(0, 64, (8,))]).backward()
            optimizer.step()
    h = dshistory.open(root)
    h.analyze(quiet=True)
    return h


def test_noise_does_not_come_first(trained: Explorer) -> None:
    for a, b in ((0, 5), (5, 10), (10, 15)):
        rows = list(trained.diff(a, b))
        assert all(math.isfinite(row["times_usual"]) for row in rows), (a, b)
        assert not [row["name"] for row in rows[:10] if "key.bias" in row["name"]], (a, b)
        assert rows[0]["times_usual"] < 4, (a, b)
    assert math.isinf(trained.diff(0, 5, metrics="relative_update")[0]["relative_update"])


def test_a_layer_that_trains_ten_times_as_fast_leads(trained: Explorer) -> None:
    table = trained.diff(15, 20)
    assert {row["name"].split(".")[1] for row in table[:8]} == {"2"}
    (first, second, *_) = trained.diff(15, 20, by="layer")
    assert first["name"] == "blocks.2"
    assert first["times_usual"] > 2 * second["times_usual"]
    assert "times_usual: how many times as far as such tensors moved" in table.note


def test_a_tensor_that_was_replaced_leads(trained: Explorer) -> None:
    (first, *_) = trained.diff(20, 25)
    assert first["name"] == "blocks.1.up.weight"
    shown = {(row["layer"], row["step"]): row["most"] for row in trained.layers()}
    assert shown["blocks.1", 25] == "blocks.1.up.weight"
    assert shown["norm", 5] == "norm.bias"


def test_no_tensor_stands_out_in_its_layer_by_its_birth_at_zero(trained: Explorer) -> None:
    first = {row["layer"]: row["most"] for row in trained.layers() if row["step"] == 5}
    born = {row["name"] for row in trained.diff(0, 5) if math.isinf(row["relative_update"])}
    assert {f"blocks.{i}.key.bias" for i in range(BLOCKS)} <= born
    assert not [most for most in first.values() if most.endswith("key.bias")]


def ranked(tmp_path: Path, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, float | None]:
    table = history_of(tmp_path, [whole(before)], [whole(after)], world_sizes=(1, 1)).diff(10, 20)
    return {row["name"]: row["times_usual"] for row in table}


def test_each_is_measured_against_the_same_name_in_other_layers(tmp_path: Path) -> None:
    names = [f"h.{i}.{part}" for i in range(3) for part in ("a", "b")]
    before = {name: torch.full((4, 4), 2.0) for name in names}
    moved = {"h.0.a": 0.2, "h.1.a": 0.2, "h.2.a": 0.6, "h.0.b": 0.4, "h.1.b": 0.4, "h.2.b": 0.4}
    found = ranked(tmp_path, before, {name: before[name] + moved[name] for name in names})
    assert list(found)[0] == "h.2.a"
    assert found == pytest.approx({**dict.fromkeys(names, 1.0), "h.2.a": 3.0}, rel=1e-5)


def test_what_is_small_counts_as_typical_and_what_has_no_peers_as_the_liveliest(tmp_path: Path) -> None:
    before = {f"h.{i}.w": torch.ones(100) for i in range(4)} | {"bias": torch.zeros(4), "head": torch.ones(4)}
    moved = {f"h.{i}.w": 0.1 for i in range(4)} | {"bias": 0.2, "head": 0.05}
    found = ranked(tmp_path, before, {name: tensor + moved[name] for name, tensor in before.items()})
    assert found == pytest.approx({**{f"h.{i}.w": 1.0 for i in range(4)}, "bias": 2.0, "head": 0.5}, rel=1e-5)


def test_counters_are_compared_among_themselves_and_what_is_still_has_zero(tmp_path: Path) -> None:
    before = {"n": torch.tensor(1), "w.0": torch.ones(3), "w.1": torch.ones(3), "still": torch.ones(3)}
    after = {"n": torch.tensor(9), "w.0": torch.ones(3) * 1.5, "w.1": torch.ones(3) * 1.5, "still": torch.ones(3)}
    assert ranked(tmp_path, before, after) == pytest.approx({"n": 1.0, "w.0": 1.0, "w.1": 1.0, "still": 0.0})


def test_moments_that_are_zero_before_have_finite_figures(tmp_path: Path) -> None:
    found = ranked(tmp_path, {"a": torch.zeros(9), "b": torch.zeros(9)}, {"a": torch.ones(9), "b": torch.ones(9) * 3})
    assert found == pytest.approx({"b": 3.0, "a": 1.0})
