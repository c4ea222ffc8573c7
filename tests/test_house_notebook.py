"""The quickstart notebook runs from its first cell to its last, on a real history."""

import re

import nbformat
import pytest
from house_helpers import ROOT, run_python

TRAIN = """
import sys
import torch
import capture
from examples.gpt.data import TextLoader, standard_library
from examples.gpt.model import GPT, GPTConfig

torch.manual_seed(0)
config = GPTConfig(context=16, layers=2, heads=2, width=32)
model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = TextLoader(standard_library(200_000), context=config.context, batch=4)
with capture.enable(model, optimizer=optimizer, every=3, history=sys.argv[1], dataloader=loader) as session:
    for _, (tokens, targets) in zip(range(12), loader):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    run_python("-c", TRAIN, str(folder / "history"), cwd=ROOT)
    notebook = ROOT / "notebooks" / "quickstart.ipynb"
    run_python(str(ROOT / "examples" / "notebook.py"), str(notebook), str(folder / "history"), str(folder), cwd=folder)
    return folder


def test_every_cell_ran_without_a_complaint(executed):
    cells = nbformat.read(executed / "quickstart.ipynb", as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]


def test_the_page_draws_its_figures_without_a_network(executed):
    page = (executed / "quickstart.html").read_text()
    assert page.count('class="plotly-graph-div" id="') == 3
    assert not re.findall(r'<(?:script|link)[^>]*(?:src|href)="https?:', page)


def test_the_losses_of_every_step_are_in_the_notebook(executed):
    cells = nbformat.read(executed / "quickstart.ipynb", as_version=4).cells
    figure = next(
        o.data["application/vnd.plotly.v1+json"] for c in cells if "checkpoints.plot()" in c.source for o in c.outputs
    )
    assert len(figure["data"][0]["y"]) == 12
