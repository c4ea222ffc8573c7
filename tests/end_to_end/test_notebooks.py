"""Every notebook runs completely in a real kernel on a real history, and its text is true."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import nbformat
import pytest
from places import ROOT
from project_helpers import run_python

import dshistory

pytestmark = pytest.mark.exhaustive

FIGURES = {"loss_jumped": 5, "comparing_runs": 6, "sql_cookbook": 0, "quickstart": 3}
"""The number of figures that each notebook draws."""
PLOTLY = "application/vnd.plotly.v1+json"


class Executed:
    """A notebook that has run, and the history that it ran on."""

    def __init__(self, folder, name, history):
        self.page = (folder / f"{name}.html").read_text()
        self.cells = [c for c in nbformat.read(folder / f"{name}.ipynb", as_version=4).cells if c.cell_type == "code"]
        self.history = dshistory.Explorer.open(history)

    def cell(self, part):
        (found,) = [cell for cell in self.cells if part in cell.source]
        return found

    def text(self, part):
        """Return the output of the cell with `part` in its source, as text."""
        return "".join(out.get("text", "") or out.data["text/plain"] for out in self.cell(part).outputs)

    def rows(self, part):
        """Return the rows of the table that the cell shows as lists of words, without the note."""
        head, _, *lines = (line.split() for line in self.text(part).splitlines())
        return [line for line in lines if len(line) == len(head)]

    def figure(self, part):
        return next(out.data[PLOTLY] for out in self.cell(part).outputs if PLOTLY in out.get("data", {}))


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory):
    """Execute the notebooks once for all tests; return them by name."""
    folder = tmp_path_factory.mktemp("notebooks")
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(FIGURES, pool.map(partial(execute, folder), FIGURES), strict=True))


def execute(folder, name):
    examples, history = ROOT / "examples", folder / "histories" / name
    if name == "quickstart":  # its history is that of the demo elsewhere
        plain = str(examples / "gpt" / "plain.py")
        run_python(plain, "--history", str(history), "--steps", "12", "--every", "3", cwd=folder)
        source = str(ROOT / "notebooks" / "quickstart.ipynb")
        run_python(str(examples / "notebook.py"), source, str(history), str(folder), cwd=folder)
    else:
        run_python(str(examples / "notebooks.py"), name, "--output", str(folder), cwd=folder)
    return Executed(folder, name, history)


def test_every_notebook_is_among_them():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == FIGURES.keys()


@pytest.mark.parametrize("name", FIGURES)
def test_it_names_its_kernel_and_is_small(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert json.loads(path.read_text())["metadata"]["kernelspec"]["name"] == "python3"
    assert path.stat().st_size < 100_000


@pytest.mark.parametrize("name", FIGURES)
def test_every_cell_ran_without_a_complaint(notebooks, name):
    code = notebooks[name].cells
    assert all(cell.execution_count for cell in code)
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]


@pytest.mark.parametrize("name", FIGURES)
def test_its_page_draws_the_figures_without_a_network(notebooks, name):
    page = notebooks[name].page
    assert page.count('class="plotly-graph-div" id="') == FIGURES[name]
    assert not re.findall(r'<(?:script|link)[^>]*(?:src|href)="https?:', page)


def test_the_losses_of_every_step_are_in_the_quickstart(notebooks):
    assert len(notebooks["quickstart"].figure("checkpoints.plot()")["data"][0]["y"]) == 12


def test_the_fault_is_found_where_it_was_planted(notebooks):
    jumped = notebooks["loss_jumped"]
    planted = int(re.search(r"--spike (\d+)", (ROOT / "examples" / "notebooks.py").read_text())[1])
    assert jumped.text("culprit = ") == f"step {planted}: a learning rate of 1\n"
    answers = {int(step): holds for _, step, holds in jumped.rows("h.bisect(")}
    before = max(step for step, holds in answers.items() if holds == "no")
    first = min(step for step, holds in answers.items() if holds == "yes")
    assert first - before == 5
    assert before < planted <= first
    assert set(
        re.findall(r"^ *(\d+)  (?:norm jumps|second moment explodes|large update)", jumped.text("h.anomalies("), re.M)
    ) == {str(first)}
    usual, these = (float(line.split()[-1]) for line in jumped.text("farthest that").splitlines())
    assert usual < 5 * 3.2 * 0.001 < 1 < these


def test_the_training_was_saved_by_going_back(notebooks):
    jumped = notebooks["loss_jumped"]
    *steps, last = jumped.rows("AS second_run")
    assert {int(step): equal for step, _, _, equal in steps} == {
        81: "yes", 82: "yes", 83: "yes", 84: "no", 85: "no", 86: "no"
    }  # fmt: skip
    assert last[0] == "120"
    assert float(last[2]) < 3 < 5 < float(last[1])
    first, second = jumped.history.history.runs()
    assert (second.parent_run, second.parent_step) == (first.run, 80)
    assert second.facts["replay"]["change"] == {"lr": 0.001}
    assert len(jumped.figure("h.replay(")["data"]) == 2
    apart = jumped.figure("h.compare(")["data"][0]["y"]
    assert len(apart) == 24 + 1
    assert jumped.text("h.runs()").splitlines()[2].startswith("*")
    assert "lr 0.001" in jumped.text("h.runs()")


def test_the_notebook_names_the_cause_before_it_searches(notebooks):
    jumped = notebooks["loss_jumped"]
    first = jumped.text("h.diagnose(").splitlines()[2].split()
    assert first[:3] == ["learning", "rate", "83"]
    assert "state: from" in jumped.text("h.crossover(")


def test_the_two_runs_compare_as_the_text_says(notebooks):
    compared = notebooks["comparing_runs"]
    differences = [float(row[-1]) for row in compared.rows("AS from_step")]
    assert len(differences) == 6
    assert differences[0] < -0.1
    assert differences[-1] > 0.05
    assert "0 changed; 28 equal bit for bit" in compared.text(':0", by="kind"')
    # The headings of this table contain spaces.
    lines = [line.split() for line in compared.text("between the runs").splitlines()[2:]]
    apart = {int(step): [float(distance) for distance in distances] for step, *distances in lines}
    assert all(between > slow for between, slow, _ in apart.values())
    assert apart[40][2] / apart[120][2] == pytest.approx(0.75, abs=0.05)


def test_the_cookbook_has_ten_questions_and_one_more_and_their_answers(notebooks):
    book = notebooks["sql_cookbook"]
    queries = [cell for cell in book.cells if cell.source.startswith("%%dshistory sql\n")]
    assert len(queries) == 11
    unanswered = [cell.source for cell in queries if "no rows" in cell.outputs[0].data["text/plain"]]
    assert unanswered == [book.cell("nan + inf").source]
    assert book.rows("AS growth")[0][0] == "tokens.weight"
    assert float(book.rows("AS saved_share")[0][-1]) > 0.05
    assert {row[0] for row in book.rows("exponents")} == {"model", "exp_avg", "exp_avg_sq", "step"}
    dead = book.rows("zeros > 0")
    assert dead
    assert all(name.startswith("blocks.0.") and name.endswith(".bias") for _, name, *_ in dead)


def test_the_cookbooks_answers_are_those_of_the_tensors(notebooks):
    book = notebooks["sql_cookbook"]
    moments = book.history.restore(60, kinds="exp_avg_sq")["exp_avg_sq"]
    lost = sum(int(((tensor > 0) & (tensor < 2**-24)).sum()) for tensor in moments.values())
    (row,) = [row for row in book.rows("exponents") if row[0] == "exp_avg_sq"]
    assert int(row[1]) == lost
    weights = book.history.restore(60, kinds="model")["model"]
    del weights["head.weight"]  # another name of tokens.weight
    norm = sum(float(tensor.double().square().sum()) for tensor in weights.values()) ** 0.5
    assert float(book.rows("AS weight_norm")[-1][-1]) == pytest.approx(norm, rel=1e-3)
