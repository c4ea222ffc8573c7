"""Fixtures: a history with a planted fault, a JupyterLab that shows it, and a headless Chromium."""

import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from browser_history import SPIKE, STEPS, training
from browser_lab import Lab, running_lab
from browser_page import PICTURES, WAIT_MS
from places import ROOT
from playwright.sync_api import Browser, expect, sync_playwright

import dshistory

CHROMIUM = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the history of a training whose learning rate jumps once, at step SPIKE."""
    history = tmp_path_factory.mktemp("trained") / "history"
    with training(history, "--spike", str(SPIKE)) as run:
        assert run.go_on(STEPS) == STEPS
    dshistory.Explorer.open(history).analyze(quiet=True)  # adds statistics that the training had no time for
    return history


@pytest.fixture(scope="session")
def lab(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Run a server with a copy of the project's notebooks; `$DSHISTORY` of its kernels is the trained history."""
    root = tmp_path_factory.mktemp("notebooks")
    shutil.copytree(ROOT / "notebooks", root, dirs_exist_ok=True)
    own = tmp_path_factory.mktemp("jupyter")
    with running_lab(root, own, DSHISTORY=str(trained)) as lab:
        yield lab


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Start the installed Chromium, because playwright has none of its own here."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program, "no chromium here; `make test-browser` installs it"
    with sync_playwright() as playwright:
        expect.set_options(timeout=WAIT_MS)
        own = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("chromium"))}
        browser = playwright.chromium.launch(executable_path=program, args=CHROMIUM, env=own)
        yield browser
        browser.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Save a picture of the browser when a test has failed."""
    report = yield
    if report.failed and report.when == "call" and "browser" in item.funcargs:
        for context in item.funcargs["browser"].contexts:
            for page in context.pages:
                page.screenshot(path=PICTURES / f"failed-{item.originalname}.png")
    return report
