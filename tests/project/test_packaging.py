"""After `pip install .` into an empty environment the packages work outside the tree, as a stranger uses them."""

import subprocess
import sys
from pathlib import Path

import pytest
from architecture import LAYERS
from places import ROOT
from project_helpers import run, run_python

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

SCRIPT = """
import torch
import capture
import dshistory

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

with capture.enable(model, optimizer=optimizer, every=2, history="history"):
    expected = train(6)
dshistory.open("history")
assert dshistory.log()["step"].to_pylist() == [0, 2, 4, 6]
dshistory.restore(2, model=model, optimizer=optimizer)
assert torch.equal(train(4), expected)
assert len(dshistory.verify(quiet=True)) == 0
print(capture.__file__)
"""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Return the interpreter of an environment that has the wheel, built from this tree, and what it depends on."""
    folder = tmp_path_factory.mktemp("stranger")
    wheels = folder / "wheels"
    build = (
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        f"--config-settings=build-dir={folder / 'build'}",
    )
    run_python(*build, "-w", str(wheels), str(ROOT), cwd=folder)
    run_python("-m", "venv", str(folder / "venv"), cwd=folder)
    python = str(folder / "venv" / "bin" / "python")
    (wheel,) = wheels.glob("dshistory-*.whl")
    run([python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel)], cwd=folder)
    return python


def test_the_wheel_trains_and_restores_outside_the_tree(stranger, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    where = run_python("script.py", cwd=tmp_path, python=stranger).splitlines()[-1]
    assert Path(where).is_relative_to(Path(stranger).parent.parent)
    listing = run([str(Path(stranger).with_name("dshistory")), "log", "history"], cwd=tmp_path)
    assert "6" in listing


def test_the_wheel_holds_the_layers_and_no_sources(stranger):
    place = "import importlib.metadata as m; print(*[f for f in m.files('dshistory')], sep='\\n')"
    files = run_python("-c", place, cwd=Path(stranger).parent, python=stranger).split()
    assert {name.partition("/")[0] for name in files if ".dist-info" not in name and not name.startswith("..")} == {
        *LAYERS
    }
    assert not [name for name in files if name.endswith((".cpp", ".hpp", "CMakeLists.txt"))]
    assert "native/_core.pyi" in files
    assert {f"{layer}/py.typed" for layer in LAYERS} <= set(files)
    assert [name for name in files if name.startswith("native/_core.") and name.endswith(".so")]


def test_a_type_checker_sees_the_types_of_the_wheel(stranger, tmp_path):
    (tmp_path / "script.py").write_text(
        "import capture\n"
        "import dshistory\n"
        "def look(session: capture.Session) -> None:\n"
        "    reveal_type(session.run)\n"
        "    reveal_type(dshistory.open('history'))\n"
        "    session.wait(1, 2, 3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", stranger, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'Revealed type is "str"' in done.stdout, done.stdout
    assert 'Revealed type is "dshistory.explorer.explorer.Explorer"' in done.stdout, done.stdout
    assert 'Too many arguments for "wait" of "Session"' in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("package", "decoy"),
    [
        ("dshistory", "catalog"),
        ("dshistory", "capture"),
        ("dshistory", "native"),
        ("capture", "catalog"),
        ("capture", "native"),
        ("catalog", "capture"),
        ("catalog.errors", "capture"),
    ],
)
def test_a_module_in_the_way_is_named(stranger, tmp_path, package, decoy):
    (tmp_path / f"{decoy}.py").write_text("x = 'somebody else'\n")
    (tmp_path / "script.py").write_text(f"import {package}\n")
    done = subprocess.run([stranger, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert str(tmp_path / f"{decoy}.py") in done.stderr


def test_this_interpreter_runs_the_tree_itself():
    """Tests that pass on an installed copy say nothing about the sources."""
    import capture

    assert Path(capture.__file__).is_relative_to(ROOT), f"{sys.executable} imports {capture.__file__}"
