"""The explorer shows what a running training commits, without any action on the page."""

from browser_explorer import ExplorerPage
from browser_history import training
from browser_page import opened, write_notebook
from browser_training import EVERY


def test_checkpoints_appear_while_the_training_goes_on(lab, browser, tmp_path):
    history = tmp_path / "history"
    with training(history) as run:
        assert run.go_on(2 * EVERY) == 2 * EVERY
        cells = (f"import dshistory\nh = dshistory.open({str(history)!r})", "h.watch(seconds=0.2)")
        with opened(browser, lab, write_notebook(lab, "watch.ipynb", *cells)) as notebook:
            notebook.run_all()
            explorer = ExplorerPage(notebook)
            explorer.wait_until(f"trace.x.at(-1) === {2 * EVERY}", trace="checkpoints")
            for step in (3 * EVERY, 4 * EVERY):
                assert run.go_on(EVERY) == step
                explorer.wait_until(f"trace.x.at(-1) === {step}", trace="checkpoints")
                explorer.wait_until(f"trace.x.length === {step // EVERY + 1} && trace.x.at(-1) === {step}")
            explorer.wait_until(f"trace.x.at(-1) === {4 * EVERY}", trace="metric")
            notebook.see(".dsh-figure")
            notebook.picture("watch")
