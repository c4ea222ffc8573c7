"""The training whose state is saved: a GPT and AdamW, with enough parameters for the requested number of bytes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from examples.gpt.model import GPT, GPTConfig


@dataclass
class Training:
    """A training with fp32 weights and Adam's two moments: three times the bytes of the parameters."""

    model: nn.Module
    optimizer: torch.optim.AdamW

    def state_bytes(self) -> int:
        moments = [v for state in self.optimizer.state.values() for v in state.values() if v.dim()]
        return sum(t.numel() * t.element_size() for t in [*self.model.parameters(), *moments])

    def update(self) -> None:
        """Take one optimizer step with the existing gradients, which changes every weight and every moment."""
        self.optimizer.step()

    def renew_gradients(self) -> None:
        """Set new gradients: with equal gradients the first moments would stop changing, and a restore clears
        gradients.
        """
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.randn_like(parameter) * 1e-3
            else:
                parameter.grad.neg_()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state as one flat table of live tensors, with the tied head once."""
        flat = {f"model/{name}": parameter.data for name, parameter in self.model.named_parameters()}
        for index, state in enumerate(self.optimizer.state.values()):
            flat |= {f"optimizer/{index}/{key}": value for key, value in state.items()}
        return flat

    def parameter_names(self) -> dict[str, str]:
        """Return the name of the parameter to which each key of `tensors` belongs."""
        names = [name for name, _ in self.model.named_parameters()]
        of_moments = {
            f"optimizer/{index}/{key}": name
            for index, (name, state) in enumerate(zip(names, self.optimizer.state.values(), strict=True))
            for key in state
        }
        return {f"model/{name}": name for name in names} | of_moments


def gpt(state_bytes: int, *, context: int = 128) -> GPT:
    """Return a GPT of width 1024 with enough layers for `state_bytes` of weights and moments.

    A size below a single such layer gives a narrower model.
    """
    width = 1024 if state_bytes >= _layer_bytes(1024) else 128
    layers = max(1, -(-state_bytes // _layer_bytes(width)))
    return GPT(GPTConfig(width=width, heads=width // 64, layers=layers, context=context))


def _layer_bytes(width: int) -> int:
    return 12 * width * width * 3 * 4


def filled(model: nn.Module) -> Training:
    """Return a training after its first update, with gradients for further ones."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    training.update()
    return training
