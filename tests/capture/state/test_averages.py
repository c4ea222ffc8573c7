"""An average of the weights that was not passed is named, with the call that captures it; nothing else is."""

import copy
import warnings

import pytest
import torch
from capture_helpers import make

import capture


class ModelEma(torch.nn.Module):
    """An average as users write it: a copy of the model that follows it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.online = model
        self.copy = copy.deepcopy(model)


class ExponentialMovingAverage:
    """An average that is no module, but a list of tensors."""

    def __init__(self, parameters) -> None:
        self.shadow_params = [parameter.detach().clone() for parameter in parameters]

    def state_dict(self):
        return {"shadow_params": self.shadow_params}

    def load_state_dict(self, state):
        self.shadow_params = list(state["shadow_params"])


AVERAGES = {
    "torch's own": torch.optim.swa_utils.AveragedModel,
    "a module": ModelEma,
    "a list": lambda model: ExponentialMovingAverage(model.parameters()),
}
# An average of another test, still alive, has other shapes.
WIDTHS = {kind: 16 + 4 * number for number, kind in enumerate(AVERAGES)}


@pytest.mark.parametrize("kind", AVERAGES)
def test_an_average_that_is_not_passed_is_named(history, kind):
    model, optimizer = make(WIDTHS[kind])
    average = AVERAGES[kind](model)
    with pytest.warns(UserWarning, match=rf"{type(average).__name__}.*not captured.*Stateful") as said:
        capture.enable(model, optimizer=optimizer, history=history).close()
    assert [warning.filename for warning in said] == [__file__]


@pytest.mark.parametrize("kind", AVERAGES)
def test_one_that_is_passed_is_not_reported(history, kind):
    model, optimizer = make(WIDTHS[kind] + 1)
    passed = capture.Stateful("average", AVERAGES[kind](model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture.enable(model, optimizer=optimizer, history=history, providers=[passed]).close()


def test_another_model_of_the_same_shapes_is_none(history):
    model, optimizer = make(40)
    teacher, smaller = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(torch.nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture.enable(model, optimizer=optimizer, history=history).close()
    del teacher, smaller
