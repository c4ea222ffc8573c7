"""Other programs read exported checkpoints in their own formats, bit for bit equal to the history."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from capture_helpers import bits
from catalog_helpers import flip_bit
from explorer_helpers import Piece, Run, shares, tiny_history, whole
from hypothesis import given, settings
from hypothesis import strategies as st

import capture
import dshistory
from catalog.errors import CorruptError, FormatError, NotFoundError, SetupError, UnsupportedError
from dshistory.commands import cli
from dshistory.conversion.exporting.partitions import groups_cut, parameters_cut
from dshistory.explorer import Explorer
from dshistory.tensors import stream


class Tied(torch.nn.Module):
    """The model has a tied head, persistent and other buffers, a frozen parameter, odd dtypes and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 7)
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        self.short = torch.nn.Parameter(torch.randn(3, 5).bfloat16())
        self.none = torch.nn.Parameter(torch.zeros(0, 4))
        self.norm = torch.nn.BatchNorm1d(7)
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x))).square().mean() + self.short.float().square().sum()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a history of a training, and the state dict at its last step."""
    torch.manual_seed(1)
    root = tmp_path_factory.mktemp("export") / "history"
    model = Tied()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    with capture.enable(model, optimizer=optimizer, every=2, history=root):
        for _ in range(4):
            model(torch.randint(0, 11, (6,))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return root, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Run]:
    yield from tiny_history(tmp_path / "history")


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def without(state: Mapping[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name not in names}


def test_a_safetensors_file_has_every_weight_once(trained, tmp_path):
    root, state = trained
    table = Explorer.open(root).export(4, tmp_path / "model.safetensors")
    assert [row["bytes"] for row in table] == [(tmp_path / "model.safetensors").stat().st_size]
    same(safetensors.torch.load_file(tmp_path / "model.safetensors"), without(state, "head.weight"))
    model = Tied()
    safetensors.torch.load_model(model, tmp_path / "model.safetensors")
    same(model.state_dict(), state)


def test_safetensors_shards_stay_below_the_size_and_are_all_in_the_index(trained, tmp_path):
    root, state = trained
    Explorer.open(root).export(4, tmp_path / "out", shard_bytes=150)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        content = safetensors.torch.load_file(tmp_path / "out" / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == content.keys()
        assert len(content) == 1 or sum(tensor.nbytes for tensor in content.values()) <= 150
        found.update(content)
    same(found, without(state, "head.weight"))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    Explorer.open(root).export(4, tmp_path / "one", shard_bytes=1 << 20)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]


def test_a_large_tensor_is_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "PIECE_BYTES", 100)
    weight = torch.randn(33, 7)
    run = Run(tmp_path / "history", world_size=3)
    run.checkpoint(1, *shares({"weight": weight, "bias": torch.randn(5)}, 3))
    run.close()
    Explorer.open(run.root).export(1, tmp_path / "m.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "m.safetensors")["weight"], weight)


def test_a_torch_file_loads_with_weights_only_and_keeps_ties(trained, tmp_path):
    root, state = trained
    Explorer.open(root).export(4, tmp_path / "model.pt", format="torch")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    same(found, state)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    Tied().load_state_dict(found)


def test_a_dcp_folder_loads_into_a_model(trained, tmp_path):
    root, state = trained
    Explorer.open(root).export(4, tmp_path / "dcp", format="dcp")
    model = Tied()
    found = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    same(found, state)


@pytest.mark.slow
def test_from_pretrained_loads_a_hugging_face_folder(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture.enable(model, optimizer=optimizer, every=1, history=tmp_path / "history"):
        model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
    explorer = Explorer.open(tmp_path / "history")
    config.save_pretrained(tmp_path / "config")
    for out, options in {
        "a": {"model": model},
        "b": {"config": tmp_path / "config" / "config.json", "shard_bytes": 3000},
        "c": {"config": tmp_path / "config", "shard_bytes": 3000},
    }.items():
        explorer.export(1, tmp_path / out, format="huggingface", **options)
        loaded, report = LlamaForCausalLM.from_pretrained(tmp_path / out, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        same(loaded.state_dict(), model.state_dict())
    assert (tmp_path / "b" / "model.safetensors.index.json").exists()
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "a")) is LlamaForCausalLM


def test_hugging_face_without_a_configuration_says_what_to_pass(tiny, tmp_path):
    explorer = Explorer.open(tiny.root)
    with pytest.raises(SetupError, match=r"config= .* or model="):
        explorer.export(10, tmp_path / "out", format="huggingface")
    with pytest.raises(NotFoundError, match=r"no configuration at .*nowhere"):
        explorer.export(10, tmp_path / "out", format="huggingface", config=tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(FormatError, match="must hold a JSON object"):
        explorer.export(10, tmp_path / "out", format="huggingface", config=tmp_path)
    with pytest.raises(SetupError, match="no to_dict"):
        explorer.export(10, tmp_path / "out", format="huggingface", model=torch.nn.Linear(1, 1))
    assert not (tmp_path / "out").exists()


def test_master_weights_in_place_of_those_of_the_model(tmp_path):
    masters = {"a": torch.randn(4, 3), "b": torch.randn(5)}
    frozen = torch.randn(2).bfloat16()
    run = Run(tmp_path / "history")
    low = {name: tensor.bfloat16() for name, tensor in masters.items()}
    run.checkpoint(1, [*whole({**low, "frozen": frozen}), *whole(masters, kind="master")])
    run.checkpoint(2, whole(low))
    run.close()
    explorer = Explorer.open(run.root)
    explorer.export(1, tmp_path / "m.safetensors", weights="master")
    same(safetensors.torch.load_file(tmp_path / "m.safetensors"), {**masters, "frozen": frozen})
    explorer.export(1, tmp_path / "w.safetensors")
    same(safetensors.torch.load_file(tmp_path / "w.safetensors"), {**low, "frozen": frozen})
    with pytest.raises(NotFoundError, match="no master weights"):
        explorer.export(2, tmp_path / "n.safetensors", weights="master")
    with pytest.raises(NotFoundError, match=r"no weights of kind 'fp32'.*the kinds are master, model"):
        explorer.export(1, tmp_path / "n.safetensors", weights="fp32")


def test_refusals_name_what_there_is(tiny, tmp_path):
    explorer = Explorer.open(tiny.root)
    with pytest.raises(
        SetupError, match="no format 'gguf'; the formats are safetensors, torch, dcp, huggingface, deepspeed, universal"
    ):
        explorer.export(10, tmp_path / "x", format="gguf")
    with pytest.raises(NotFoundError, match="10"):
        explorer.export(11, tmp_path / "x")
    with pytest.raises(SetupError, match="config means nothing to the format 'torch'"):
        explorer.export(10, tmp_path / "x", format="torch", config="c.json")
    with pytest.raises(SetupError, match="shard_bytes=0"):
        explorer.export(10, tmp_path / "x", shard_bytes=0)
    with pytest.raises(SetupError, match="does not exist; make it first"):
        explorer.export(10, tmp_path / "no" / "x")
    assert not [path for path in tmp_path.iterdir() if path.name != "history"]


@pytest.mark.parametrize("format", ["deepspeed", "universal"])
def test_state_without_a_form_in_deepspeeds_checkpoints_is_refused_by_name(tiny, tmp_path, format):
    explorer = Explorer.open(tiny.root)
    with pytest.raises(NotFoundError, match=r"run-a:10 has no optimizer state"):
        explorer.export(10, tmp_path / "x", format=format)
    for number, (facts, group, what) in enumerate(
        [
            ({"engine": "deepspeed.runtime.pipe.engine.PipelineEngine"}, {}, "a pipeline"),
            ({}, {"moe": True}, "experts"),
        ]
    ):
        run = Run(tmp_path / f"history-{number}", facts=facts)
        saved = {"class": "torch.optim.adamw.AdamW", "groups": [{"params": ["w"], **group}], "kinds": [], "state": {}}
        json_bytes = torch.frombuffer(bytearray(json.dumps(saved).encode()), dtype=torch.uint8)
        run.checkpoint(1, [*whole({"w": torch.ones(3)}), Piece("optimizer", json_bytes, "object")])
        run.close()
        with pytest.raises(UnsupportedError, match=f"of a run with {what}"):
            Explorer.open(run.root).export(1, tmp_path / "x", format=format)
    assert not (tmp_path / "x").exists()


def test_wrong_deepspeed_options_are_refused(trained, tmp_path):
    explorer = Explorer.open(trained[0])
    with pytest.raises(SetupError, match="zero_stage=4: must be one of 0, 1, 2, 3"):
        explorer.export(4, tmp_path / "x", format="deepspeed", zero_stage=4)
    with pytest.raises(SetupError, match="world_size=0: must be 1 or more"):
        explorer.export(4, tmp_path / "x", format="deepspeed", world_size=0)
    with pytest.raises(SetupError, match="zero_stage means nothing to the format 'universal'"):
        explorer.export(4, tmp_path / "x", format="universal", zero_stage=1)


@settings(deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=3),
    world_size=st.integers(1, 5),
    limit=st.integers(1, 60),
)
def test_every_element_is_in_exactly_one_rank(groups, world_size, limit):
    named = [[(f"{g}.{i}", numel) for i, numel in enumerate(group)] for g, group in enumerate(groups)]
    for stage in (2, 3):
        seen = {name: [0] * numel for group in named for name, numel in group}
        for rank in range(world_size):
            if stage == 3:
                flats = parameters_cut(named, rank=rank, world_size=world_size, sub_group_elements=limit)
            else:
                flats = groups_cut(named, rank=rank, world_size=world_size)
            for flat in flats:
                held = [False] * flat.numel
                for piece in flat.pieces:
                    for i in range(piece.numel):
                        seen[piece.name][piece.start + i] += 1
                        assert not held[piece.at + i]
                        held[piece.at + i] = True
                assert not any(held[flat.numel - flat.padding :])
        assert all(count == 1 for counts in seen.values() for count in counts)


def test_an_existing_target_is_replaced_only_on_request(tiny, tmp_path):
    explorer = Explorer.open(tiny.root)
    place = tmp_path / "model.safetensors"
    place.write_text("mine")
    with pytest.raises(SetupError, match=r"it exists; name another place, or pass overwrite=True"):
        explorer.export(10, place)
    assert place.read_text() == "mine"
    explorer.export(10, place, overwrite=True)
    first = place.read_bytes()
    explorer.export(20, place, overwrite=True)
    assert place.read_bytes() != first
    explorer.export(20, place, format="dcp", overwrite=True)
    assert (place / ".metadata").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history", "model.safetensors"]


def test_the_history_is_never_written_over(tiny, tmp_path, monkeypatch):
    explorer = Explorer.open(tiny.root)
    monkeypatch.chdir(tmp_path / "history" / "runs")
    for place in (tiny.root, tmp_path, tiny.root / "runs" / "x.safetensors", tmp_path / "history" / "runs"):
        with pytest.raises(SetupError, match="would write over"):
            explorer.export(10, place, overwrite=True)
    assert not len(explorer.verify(quiet=True))


def test_an_export_that_fails_leaves_what_was_there(tiny, tmp_path):
    place = tmp_path / "model.safetensors"
    place.write_text("mine")
    data = tiny.writers[0].paths.data(tiny.run, 10, 0)
    flip_bit(data, offset=4096)
    with pytest.raises(CorruptError, match="checksum"):
        Explorer.open(tiny.root).export(10, place, overwrite=True)
    assert place.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history", "model.safetensors"]


def test_the_command_line_exports(tiny, tmp_path, capsys):
    assert cli.main(["export", str(tiny.root), "10", str(tmp_path / "10"), "--shard-bytes", "100"]) == 0
    assert "safetensors" in capsys.readouterr().out
    assert (tmp_path / "10" / "model.safetensors.index.json").exists()
    dshistory.open(tiny.root)
    assert len(dshistory.export(20, tmp_path / "20.pt", format="torch")) == 1
