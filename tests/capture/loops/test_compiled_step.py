"""An optimizer whose step is compiled, as torch's own recipe does it, is captured as any other."""

import pytest
import torch

import capture
import dshistory
from catalog.errors import MismatchError

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def trained(history, make, *, compiled, **options):
    """Train seven steps, the update compiled or not; return the weights after each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 3))
    optimizer = make(model.parameters())
    step = optimizer.step
    if compiled:
        torch._dynamo.reset()
        step = torch.compile(lambda: optimizer.step(), backend="eager")
    kept = {}
    with capture.enable(model, optimizer=optimizer, every=3, history=history, stats_every=0, **options) as session:
        for _ in range(7):
            model(torch.randn(5, 16)).square().mean().backward()
            step()
            optimizer.zero_grad()
            kept[session.step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return kept


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it does not compile
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_captured_steps_are_those_of_the_training_and_the_others_are_refused_by_name(history, name):
    kept = trained(history, OPTIMIZERS[name], compiled=True, redo=True, fingerprints=False)
    h = dshistory.open(history)
    for number in (3, 6, 7):
        found = h.restore(number)["model"]
        assert all(torch.equal(found[name], tensor) for name, tensor in kept[number].items()), number
    for number in (1, 2, 4, 5):
        with pytest.raises(MismatchError, match=r"its update was compiled \(torch\.compile\)"):
            h.restore(number)


def test_an_update_that_is_not_compiled_is_made_again(history):
    kept = trained(history, OPTIMIZERS["AdamW"], compiled=False, redo=True)
    h = dshistory.open(history)
    for number, weights in kept.items():
        found = h.restore(number)["model"]
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items()), number
