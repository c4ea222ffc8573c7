"""A training in low precision whose optimizer holds float32 masters, in a plain loop and without a framework."""

from pathlib import Path
from typing import Any

import torch
from capture_helpers import reference

import capture
from capture.session.session import Session
from catalog.history import History

State = dict[str, dict[str, torch.Tensor]]


class MixedAdam(torch.optim.Optimizer):
    """Adam over float32 masters (`master_param`), whose rounded values the parameters get after every update."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "master_param": parameter.detach().float(),
                    "exp_avg": torch.zeros(parameter.shape),
                    "exp_avg_sq": torch.zeros(parameter.shape),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                gradient = parameter.grad.to(state["master_param"])
                state["exp_avg"].lerp_(gradient, 0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                state["master_param"].addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-0.01)
                parameter.copy_(state["master_param"])


class OtherRounding(MixedAdam):
    """Rounds half of the weights to the other neighbour of their masters, as stochastic rounding does."""

    rounds_otherwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._round_otherwise()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        self._round_otherwise()

    @torch.no_grad()
    def _round_otherwise(self) -> None:
        if self.rounds_otherwise:
            for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
                parameter.view(torch.int16)[..., ::2] ^= 1


def mixed(width: int, dtype: torch.dtype) -> tuple[torch.nn.Module, MixedAdam]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width)).to(dtype)
    return model, MixedAdam(model.parameters())


def update_mixed(model: torch.nn.Module, optimizer: MixedAdam) -> None:
    weight = next(model.parameters())
    model(torch.randn(4, weight.shape[-1], dtype=weight.dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_mixed(model: torch.nn.Module, optimizer: MixedAdam, session: Session, steps: int) -> dict[int, State]:
    """Train and return the reference states by step; each is committed before the next update."""
    expected = {}
    for _ in range(steps):
        update_mixed(model, optimizer)
        expected[session.snapshot()] = known(reference(model, optimizer))
        session.wait()
    return expected


def known(state: State) -> State:
    """Return the kinds of a reference state that have tensors."""
    return {kind: tensors for kind, tensors in state.items() if tensors}


def captured_mixed(
    root: Path, dtype: torch.dtype, *, width: int = 64, steps: int = 3, **options: Any
) -> dict[str, State]:
    """Capture every step of a training; return the expected states by reference."""
    model, optimizer = mixed(width, dtype)
    session = capture.enable(model, optimizer=optimizer, history=root, **{"every": 1, "stats_every": 0, **options})
    session.wait()
    expected = train_mixed(model, optimizer, session, steps)
    session.close()
    assert not session.failures
    return {f"{session.run}:{step}": state for step, state in expected.items()}


def codecs(root: Path) -> dict[tuple[int, str, str], str]:
    """Return how every tensor of the only run is stored, by step, kind and name."""
    rows = History.open(root).query("SELECT step, kind, name, codec FROM fragments").to_pylist()
    return {(row["step"], row["kind"], row["name"]): row["codec"] for row in rows}
