"""`convert` makes ordinary files of those of `capture.checkpoint_engine`, whole or not at all, and executes nothing.

That DeepSpeed itself loads them is tested in `tests/multi_rank/deepspeed_checkpoints/deepspeed_cases_engine.py`.
"""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog_helpers import flip_bit

import dshistory
import native
from capture.deepspeed_checkpoints.file import FileWrite
from capture.deepspeed_checkpoints.tree import COMMON_CLASSES, encode_tree
from catalog.errors import CorruptError, FormatError, NotFoundError, SetupError, UnsupportedError
from dshistory.commands import cli
from dshistory.display.progress import listening


class Harm:
    """An object whose unpickling creates a file."""

    def __reduce__(self):
        return Path.touch, (Path("harmed"),)


def save(content: Any, path: Path, *, pickle: bool = False) -> None:
    """Write `content` as the saver does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = native.Writer(backend="posix", budget_bytes=1 << 20, block_bytes=64 << 10)
    tree = encode_tree(content, known=COMMON_CLASSES, pickle=pickle)
    FileWrite.start(tree, path, writer=writer, lazy_storages=frozenset(), align=4096).finish()
    writer.close()


@pytest.fixture
def saved(tmp_path):
    """Return a folder as the saver leaves it: a tag with two files and its receipt, `latest`, an unfinished file."""
    folder, whole = tmp_path / "saved", torch.arange(100_000.0)
    content = {"module": OrderedDict(a=whole[:10], b=whole, tied=whole), "epoch": 3, "size": torch.Size([2])}
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        save(content, folder / "global_step7" / name)
    (folder / "global_step7" / ".dshistory-00000.json").write_text('{"save": "x"}')
    (folder / "global_step7" / ".x.pt.0a1b2c3d.tmp").write_bytes(b"half")
    (folder / "latest").write_text("global_step7")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_linked_tag_and_a_file_that_is_nothing_are_named(saved, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (saved / "global_step7").rename(elsewhere)
    (saved / "global_step7").symlink_to(elsewhere)
    with pytest.raises(UnsupportedError, match="global_step7 is a symbolic link to a folder"):
        dshistory.convert(saved, quiet=True)
    (saved / "global_step7").unlink()
    elsewhere.rename(saved / "global_step7")
    next((saved / "global_step7").glob("zero*.pt")).write_bytes(b"")
    with pytest.raises(FormatError, match="is neither a file of capture"):
        dshistory.convert(saved, quiet=True)
    assert not (tmp_path / "saved-deepspeed").exists()


def test_the_files_are_torchs_and_memory_is_still_shared(saved, tmp_path, capsys):
    assert cli.main(["convert", str(saved)]) == 0
    assert "2 files converted, 1 copied" in " ".join(capsys.readouterr().out.split())
    made = tmp_path / "saved-deepspeed"
    files = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    assert names(made) == [*(f"global_step7/{file}" for file in files), "latest"]
    content = torch.load(made / "global_step7" / files[0], weights_only=False)
    assert (content["epoch"], type(content["size"]), type(content["module"])) == (3, torch.Size, OrderedDict)
    module = content["module"]
    assert torch.equal(module["b"], torch.arange(100_000.0))
    assert module["a"].data_ptr() == module["b"].data_ptr() == module["tied"].data_ptr()
    assert (made / "global_step7" / files[0]).stat().st_size < 410_000


def test_ctrl_c_leaves_nothing(saved, tmp_path):
    def interrupt(share: float) -> None:
        if share > 0.3:
            raise KeyboardInterrupt

    with listening(interrupt), pytest.raises(KeyboardInterrupt):
        dshistory.convert(saved, to=tmp_path / "out")
    assert os.listdir(tmp_path) == ["saved"]


def test_damage_is_named_and_leaves_nothing(saved, tmp_path):
    flip_bit(saved / "global_step7" / "zero_pp_rank_0_mp_rank_00_optim_states.pt", offset=9000)
    with pytest.raises(CorruptError, match=r"optim_states\.pt: state/module/a: the file's checksum is"):
        dshistory.convert(saved, to=tmp_path / "out")
    assert os.listdir(tmp_path) == ["saved"]


def test_what_is_pickled_is_handed_on_and_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(
        {"module": {"a": torch.ones(2)}, "mine": Harm()}, tmp_path / "saved" / "mp_rank_00_model_states.pt", pickle=True
    )
    dshistory.convert(tmp_path / "saved", to=tmp_path / "out")
    table = dshistory.import_checkpoint(tmp_path / "saved", history=tmp_path / "history", step=1)
    assert table[0]["left_out"] == "mine"
    assert not (tmp_path / "harmed").exists()
    torch.load(tmp_path / "out" / "mp_rank_00_model_states.pt", weights_only=False)
    assert (tmp_path / "harmed").exists()


def test_what_can_not_be_converted_is_refused_by_name(saved, tmp_path):
    with pytest.raises(NotFoundError, match="it is not a folder"):
        dshistory.convert(tmp_path / "nowhere")
    (tmp_path / "plain").mkdir()
    torch.save({"module": {}}, tmp_path / "plain" / "x.pt")
    with pytest.raises(NotFoundError, match=r"none of its 1 files was saved through capture\.checkpoint_engine"):
        dshistory.convert(tmp_path / "plain")
    (tmp_path / "there").mkdir()
    with pytest.raises(SetupError, match=r"convert to .*there: it exists; name another place, or pass overwrite=True"):
        dshistory.convert(saved, to=tmp_path / "there")
    with pytest.raises(SetupError, match=r"convert to .*inside: that would write over the folder .*saved"):
        dshistory.convert(saved, to=saved / "inside")
    dshistory.convert(saved, to=tmp_path / "there", overwrite=True)
    assert names(tmp_path / "there")
    os.mkfifo(saved / "pipe")
    with pytest.raises(UnsupportedError, match="pipe is not a regular file"):
        dshistory.convert(saved, to=tmp_path / "out")
