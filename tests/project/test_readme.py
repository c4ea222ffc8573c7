"""The README's code and command lines run here, in the order of the README."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from places import ROOT
from project_helpers import run, run_python

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

README = (ROOT / "README.md").read_text()

# The README's reader has an engine or a model with its optimizer, and a loader that reports its position.
PREAMBLE = f"""
import itertools, sys
sys.path.insert(0, {str(ROOT)!r})
import deepspeed, torch
from examples.gpt.data import TextLoader, standard_library
from examples.gpt.model import GPT, GPTConfig

class Loader(TextLoader):
    def __iter__(self):
        return itertools.islice(super().__iter__(), 20)

config = GPTConfig(context=16, layers=1, heads=2, width=32)
loader = Loader(standard_library(100_000), context=config.context, batch=2)
settings = {{
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {{"enabled": True}},
    "zero_optimization": {{"stage": 2}},
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3, "torch_adam": True}}}},
}}
model = GPT(config)
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
ema = torch.optim.swa_utils.AveragedModel(model)
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=29))
dataset = [{{"input_ids": torch.arange(8), "labels": torch.arange(8)}}] * 20
arguments = TrainingArguments(
    "trainer-out", max_steps=10, per_device_train_batch_size=2, use_cpu=True, save_strategy="no", report_to=[]
)
"""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """Return the folder in which every Python block of the README was run."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "readme.ipy").write_text("\n".join([PREAMBLE, *blocks("python"), "print('read to its end')"]))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    alone |= {"DS_ACCELERATOR": "cpu", "IPYTHONDIR": str(folder / "ipython"), "OMP_NUM_THREADS": "1"}
    said = run_python("-m", "IPython", "--no-banner", "--colors=NoColor", "readme.ipy", cwd=folder, **alone)
    assert "read to its end" in said
    return folder


def test_the_python_blocks_leave_the_histories_that_they_name(followed):
    import dshistory

    assert {10, 20} <= set(dshistory.Explorer.open(followed / "history").log()["step"].to_pylist())
    assert {5, 10, 15, 20} <= set(dshistory.Explorer.open(followed / "plain").log()["step"].to_pylist())
    assert {0, 5, 10} <= set(dshistory.Explorer.open(followed / "trainer").log()["step"].to_pylist())


@pytest.mark.parametrize(
    "line", [ln for block in blocks("sh") for ln in block.splitlines() if ln.startswith("dshistory")]
)
def test_the_command_lines_run(followed, line):
    program, *arguments = shlex.split(line, comments=True)
    assert run([str(Path(sys.executable).with_name(program)), *arguments], cwd=followed)


def test_the_first_screen_shows_the_two_commands_and_the_picture():
    assert {"make demo", "make test"} <= {line.partition("#")[0].strip() for line in blocks("sh")[0].splitlines()}
    assert re.search(r"!\[[^\]]+\]\(docs/images/quickstart\.png\)", README)
