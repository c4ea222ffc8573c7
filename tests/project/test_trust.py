"""Nothing in a history is ever executed: no path that reads one unpickles."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capture_helpers import assert_same, make, one_step, reference

import capture
import catalog
import dshistory
import native
from catalog.errors import CorruptError, RestoreError
from catalog.history import History

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile"}
FORBIDDEN_METHODS = {("torch", "load"), ("np", "load"), ("numpy", "load")}


def sources() -> list[Path]:
    return [
        path
        for package in (capture, catalog, dshistory, native)
        for path in Path(package.__file__).parent.rglob("*.py")
    ]


OF_OTHERS = {
    # These read files of other programs, as data alone unless the user allows more by name.
    "capture/deepspeed_checkpoints/torch_files.py": {"pickle", "load"},
    "dshistory/conversion/importing/dcp.py": {"pickle", "load"},
    "dshistory/conversion/importing/safe_unpickle.py": {"pickle", "load"},
    # DeepSpeed's own dictionaries become pickles only where the user asks for it, here and where they are loaded.
    "capture/deepspeed_checkpoints/tree.py": {"pickle"},
    # This writes the pickles that DeepSpeed reads.
    "dshistory/conversion/deepspeed_classes.py": {"pickle"},
}
"""These files may use pickles, and no history goes through them."""


@pytest.mark.guards("Nothing is unpickled")
def test_no_source_file_can_unpickle_or_evaluate():
    found: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    bad = [name.name for name in names if name.name.split(".")[0] in FORBIDDEN_MODULES]
                case ast.ImportFrom(module=module) if module:
                    bad = [module] if module.split(".")[0] in FORBIDDEN_MODULES else []
                case ast.Call(func=ast.Name(id=name)):
                    bad = [name] if name in FORBIDDEN_CALLS else []
                case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)):
                    bad = [name] if (owner, name) in FORBIDDEN_METHODS else []
                case _:
                    bad = []
            if bad:
                found.setdefault(path.relative_to(_root(path)).as_posix(), set()).update(bad)
    assert sources()
    assert found == OF_OTHERS


@pytest.mark.slow
def test_no_module_that_opens_a_history_imports_those_files(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history):
        one_step(model, optimizer)
    script = f"""
import sys
import torch, capture, dshistory
h = dshistory.open({str(history)!r})
h.log(), h.diff(0, 1), h.verify(), h.restore(1), h.show(1), h.trajectory(metric="norm"), h.sql("SELECT 1"), h.reindex()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
capture.enable(model, optimizer=optimizer, history={str(history) + "-other"!r}).close()
capture.restore(0, history={str(history) + "-other"!r}, model=model, optimizer=optimizer)
print(*sorted(sys.modules))
"""
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert "dshistory.comparison.diff" in loaded
    assert not {file.removesuffix(".py").replace("/", ".") for file in OF_OTHERS} & set(loaded)


def _root(path: Path) -> Path:
    """Return the folder that holds the package of a source file."""
    package = next(p for p in (capture, catalog, dshistory, native) if Path(p.__file__).parent in path.parents)
    return Path(package.__file__).parent.parent


@pytest.mark.guards("Nothing is unpickled")
def test_a_restore_works_where_unpickling_is_impossible(history, monkeypatch):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        one_step(model, optimizer)
        expected = reference(model, optimizer)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("something unpickles")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    monkeypatch.setattr(torch, "load", never)
    other, other_optimizer = make(seed=6)
    capture.restore(f"{session.run}:1", history=history, model=other, optimizer=other_optimizer)
    assert_same(reference(other, other_optimizer), expected)
    assert_same(capture.restore(f"{session.run}:1", history=history), expected)


@pytest.mark.guards("Damage is found and named")
@pytest.mark.parametrize("where", [0.2, 0.5, 0.8, 0.999])
def test_a_flipped_bit_is_named_and_never_restored(history, where):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        one_step(model, optimizer)
    opened = History.open(history)
    extents = [
        e for e in opened.extents(opened.resolve(f"{session.run}:1")) if e.kind not in ("header", "pad") and e.nbytes
    ]
    victim = extents[int(where * len(extents))]
    path = history / victim.file
    _flip(path, victim.offset + victim.nbytes // 2)
    other, other_optimizer = make(seed=6)
    one_step(other, other_optimizer)
    before = reference(other, other_optimizer)
    with pytest.raises(CorruptError) as refused:
        capture.restore(f"{session.run}:1", history=history, model=other, optimizer=other_optimizer)
    for part in (victim.name, path.name, str(victim.offset)):
        assert part in str(refused.value)
    assert_same(reference(other, other_optimizer), before)


@pytest.mark.guards("Damage is found and named")
def test_without_verification_damage_is_found_while_restoring(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        one_step(model, optimizer)
    opened = History.open(history)
    last = max(
        (extent for extent in opened.extents(opened.resolve(f"{session.run}:1")) if extent.kind == "exp_avg"),
        key=lambda extent: extent.offset,
    )
    _flip(history / last.file, last.offset)
    with pytest.raises(RestoreError, match=f"mixture now.*{last.name}"):
        capture.restore(f"{session.run}:1", history=history, model=model, optimizer=optimizer, verify=False)


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
