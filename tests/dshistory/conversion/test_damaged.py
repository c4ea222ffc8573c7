"""Damaged files of other programs, and folders from which a rank's part is gone, are named with what is wrong."""

import pickle
from pathlib import Path

import pytest
import torch

import dshistory
import native
from capture.deepspeed_checkpoints.file import FileWrite
from capture.deepspeed_checkpoints.torch_files import load_torch_file as load_of_engine
from capture.deepspeed_checkpoints.tree import COMMON_CLASSES, encode_tree
from catalog.errors import FormatError, UnsupportedError
from dshistory.conversion.importing.safe_unpickle import load_pickle, load_torch_file


@pytest.mark.parametrize("content", [b"\x80\x02.", b"\x80\x02]a.", b"\x80\x02K\x01K\x02s.", b"", b"\x80\x02X\xff\xff"])
def test_a_malformed_pickle_is_named(tmp_path, content):
    path = tmp_path / "scheduler.pt"
    path.write_bytes(content)
    for load in (
        load_torch_file,
        lambda path: load_of_engine(path, map_location=None, classes=[], pickle=False),
        lambda path: load_pickle(path, known={}),
    ):
        with pytest.raises((FormatError, UnsupportedError), match=r"scheduler\.pt"):
            load(path)


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    path = tmp_path / "scheduler.pt"
    path.mkdir()
    with pytest.raises(FormatError, match=r"scheduler\.pt.*[Ii]s a directory"):
        load_torch_file(path)
    with pytest.raises(FormatError, match=r"scheduler\.pt.*[Ii]s a directory"):
        load_of_engine(path, map_location=None, classes=[], pickle=False)


def test_every_flipped_byte_at_the_beginning_is_called_damage(tmp_path):
    """Those of the local header that no reader looks at change nothing."""
    path = tmp_path / "step_1.pt"
    torch.save({"a": torch.arange(4.0)}, path)
    whole, said = path.read_bytes(), []
    for offset in (*range(8), *range(64, 160, 4)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x40]) + whole[offset + 1 :])
        try:
            assert torch.equal(load_torch_file(path)["a"], torch.arange(4.0))
        except FormatError as error:
            said.append(str(error))
    assert len(said) > 10
    assert all("step_1.pt" in one for one in said)


def test_what_can_not_be_told_from_code_is_called_both(tmp_path):
    path = tmp_path / "step_1.pt"
    path.write_bytes(pickle.dumps({"a": 1}, protocol=2)[:-1] + b"\xfe.")
    with pytest.raises(UnsupportedError, match=r"step_1\.pt is damaged, or holds more than data, which can't be told"):
        load_torch_file(path)


@pytest.fixture
def parts(tmp_path) -> Path:
    """A folder of stage 1 as two ranks have saved it through our engine, without the part of the last one."""
    folder = tmp_path / "saved"
    folder.mkdir()
    writer = native.Writer(backend="posix", budget_bytes=1 << 20, block_bytes=64 << 10)

    def save(content: object, path: Path) -> None:
        tree = encode_tree(content, known=COMMON_CLASSES, pickle=False)
        FileWrite.start(tree, path, writer=writer, lazy_storages=frozenset(), align=4096).finish()

    model = {"module": {"a": torch.ones(4)}, "param_shapes": [{"a": torch.Size([4])}], "buffer_names": []}
    save(model, folder / "mp_rank_00_model_states.pt")
    flat = {"single_partition_of_fp32_groups": [torch.ones(2)], "base_optimizer_state": [{"exp_avg": torch.ones(2)}]}
    state = {"optimizer_state_dict": {**flat, "partition_count": [2], "zero_stage": 1}}
    save(state, folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    writer.close()
    return folder


def test_a_missing_part_of_a_rank_is_named(parts, tmp_path):
    gone = r"saved: bf16_zero_pp_rank_1_mp_rank_00_optim_states\.pt is missing: 1 of the 2 ranks"
    with pytest.raises(FormatError, match=gone):
        dshistory.import_checkpoint(parts, history=tmp_path / "history", step=1, quiet=True)
    with pytest.raises(FormatError, match=gone):
        dshistory.convert(parts, to=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
    part = next(parts.glob("*optim_states.pt"))
    part.rename(parts / part.name.replace("rank_0_", "rank_1_"))
    with pytest.raises(FormatError, match=r"bf16_zero_pp_rank_0_mp_rank_00_optim_states\.pt is missing"):
        dshistory.import_checkpoint(parts, history=tmp_path / "history", step=1, quiet=True)
    (parts / part.name.replace("rank_0_", "rank_1_")).unlink()
    table = dshistory.import_checkpoint(parts, history=tmp_path / "history", step=1, quiet=True)
    assert "no file *_optim_states.pt" in table[0]["left_out"]
