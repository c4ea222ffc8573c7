"""The magics run in a real kernel and are queried as a notebook queries it: completion over the wire, with Jedi on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from explorer_helpers import tiny_history
from jupyter_client.manager import start_new_kernel

pytestmark = pytest.mark.slow


class Notebook:
    """The notebook is a kernel with one history open."""

    def __init__(self, client, root: Path) -> None:
        self._client = client
        self.root = root
        self.run("%load_ext dshistory", f"%dshistory open {root}")

    def run(self, *cells: str) -> str:
        """Run code and return what the cell shows, as text."""
        shown: list[str] = []

        def listen(message) -> None:
            content = message["content"]
            shown.append(
                content.get("text") or content.get("data", {}).get("text/plain") or content.get("evalue") or ""
            )

        for cell in cells:
            self._client.execute_interactive(cell, output_hook=listen, timeout=120)
        return "\n".join(shown)

    def complete(self, code: str) -> list[str]:
        """Return the cells that completion at the end of the code would produce."""
        content = self._client.complete(code, len(code), reply=True, timeout=120)["content"]
        return [code[: content["cursor_start"]] + match for match in content["matches"]]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("kernel")
    environment = pytest.MonkeyPatch()
    environment.setenv("IPYTHONDIR", str(folder / "ipython"))
    environment.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    for run in tiny_history(folder / "history"):
        manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder))
        try:
            yield Notebook(client, run.root)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
            environment.undo()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("%dshistory lo", ["%dshistory log"]),
        ("rows = %dshistory lo", ["rows = %dshistory log"]),
        ("%dshistory show 2", ["%dshistory show 20"]),
        ("%dshistory show run-a:1", ["%dshistory show run-a:10"]),
        ("%dshistory diff 0 --b", ["%dshistory diff 0 --by"]),
        ("%dshistory diff 0 --by l", ["%dshistory diff 0 --by layer"]),
        ("%dshistory diff 0 --by=l", ["%dshistory diff 0 --by=layer"]),
        ("%dshistory diff 0 20 --kinds e", ["%dshistory diff 0 20 --kinds exp_avg"]),
        ("%dshistory trajectory --metric nor", ["%dshistory trajectory --metric norm"]),
        ("%dshistory trajectory 'layers.1", ["%dshistory trajectory 'layers.1.norm'"]),
        ("%dshistory export 0 x --format h", ["%dshistory export 0 x --format huggingface"]),
        ("%dshistory export 0 x --weights ma", ["%dshistory export 0 x --weights master"]),
        ("%dshistory restore 0 --no", ["%dshistory restore 0 --no-verify"]),
        ("%dshistory log --run r", ["%dshistory log --run run-a"]),
        ("%%dshistory ", ["%%dshistory sql"]),
        ("%%dshistory sql --no", ["%%dshistory sql --no-execute"]),
        ("%%dshistory sql rows <<\nSELECT * FROM chec", ["%%dshistory sql rows <<\nSELECT * FROM checkpoints"]),
        ("%dshistory sql SELECT * FROM metr", ["%dshistory sql SELECT * FROM metrics"]),
        ("%%dshistory sql\nSELECT m.val", ["%%dshistory sql\nSELECT m.value"]),
        ("%%dshistory sql\nSELECT m.val FROM metrics m WHERE m.na", None),
    ],
)
def test_completion_offers_fitting_words_and_none_of_pythons(
    notebook: Notebook, code: str, expected: list[str] | None
) -> None:
    assert notebook.complete(code) == (expected or [f"{code}me"])


def test_folders_are_completed_where_one_is_expected(notebook: Notebook) -> None:
    start = f"%dshistory open {notebook.root.parent}/h"
    assert notebook.complete(start) == [f"%dshistory open {notebook.root}/"]
    assert notebook.complete(start.replace("open", "log -C", 1)) == [f"%dshistory log -C {notebook.root}/"]


def test_saved_queries_and_variables_are_completed(notebook: Notebook) -> None:
    notebook.run(
        "threshold = 5", "%%dshistory sql --save late --no-execute\nSELECT * FROM metrics WHERE step > $threshold"
    )
    assert notebook.complete("%%dshistory sql\nSELECT * FROM la") == ["%%dshistory sql\nSELECT * FROM late"]
    assert notebook.complete("%%dshistory sql --with l") == ["%%dshistory sql --with late"]
    assert notebook.complete("%%dshistory sql\nSELECT $thr") == ["%%dshistory sql\nSELECT $threshold"]
    assert notebook.run("%dshistory sql SELECT min(step) AS first FROM late").split()[-1] == "10"


def test_unloading_and_loading_again(notebook: Notebook) -> None:
    try:
        notebook.run("%unload_ext dshistory")
        assert "not found" in notebook.run("%dshistory log")
        assert "%dshistory log" not in notebook.complete("%dshistory lo")
    finally:
        notebook.run("%load_ext dshistory")
    assert notebook.complete("%dshistory lo") == ["%dshistory log"]
    notebook.run("%reload_ext dshistory")
    assert notebook.complete("%dshistory lo") == ["%dshistory log"]
    assert "3 checkpoints" in notebook.run("%dshistory log")


def test_the_newest_checkpoints_are_offered_first(notebook: Notebook) -> None:
    offered = [line.removeprefix("%dshistory show ") for line in notebook.complete("%dshistory show ")]
    assert offered == ["latest", "best", "good", "20", "10", "0"]
