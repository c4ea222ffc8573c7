"""The probes find the host's file systems and io_uring, and check that our packages are the ones imported."""

import os
import re
import sys
import types
from pathlib import Path

import pytest

import native
from native._siblings import check_siblings


def test_the_probe_finds_what_a_file_system_supports(tmp_path: Path) -> None:
    facts = native.probe_file_system(str(tmp_path))
    assert set(facts) == {
        *("type", "direct", "memory_align", "offset_align", "block_bytes", "place_align", "reason"),
    }
    assert facts["block_bytes"] == tmp_path.stat().st_blksize
    page = os.sysconf("SC_PAGESIZE")
    assert facts["place_align"] % page == 0
    assert all(facts["place_align"] % max(1, facts[name]) == 0 for name in ("memory_align", "offset_align"))
    assert (facts["reason"] == "") == facts["direct"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_accepts_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as failure:
        native.probe_file_system(str(tmp_path / "none"))
    assert failure.value.filename == str(tmp_path / "none")


def test_io_uring_is_probed_truly() -> None:
    reason = native.probe_io_uring()
    if reason:
        with pytest.raises(OSError, match="io_uring") as failure:
            native.Writer(backend="io_uring", budget_bytes=8 << 20, block_bytes=1 << 20)
        assert os.strerror(failure.value.errno or 0) in reason
    else:
        native.Writer(backend="io_uring", budget_bytes=8 << 20, block_bytes=1 << 20).close()


def test_a_foreign_module_with_our_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoy = tmp_path / "shadowed_sibling.py"
    decoy.write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="its own package 'shadowed_sibling'") as failure:
        check_siblings(native.__file__, ("shadowed_sibling",))
    assert str(decoy) in str(failure.value)


def test_a_module_that_is_there_already_is_named_whether_it_has_a_spec_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = types.ModuleType("shadowed_sibling")
    monkeypatch.setitem(sys.modules, "shadowed_sibling", made)
    with pytest.raises(ImportError, match="finds nothing"):
        check_siblings(native.__file__, ("shadowed_sibling",))
    made.__file__ = str(tmp_path / "main.py")
    with pytest.raises(ImportError, match=re.escape(made.__file__)):
        check_siblings(native.__file__, ("shadowed_sibling",))


def test_our_own_packages_pass_and_a_missing_one_does_not() -> None:
    check_siblings(native.__file__, ("native",))
    with pytest.raises(ImportError, match="finds nothing"):
        check_siblings(native.__file__, ("no_such_package_anywhere",))
