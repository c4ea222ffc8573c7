"""A plain PyTorch loop: a module, its optimizers, and torch's own hooks. A step is one call of `optimizer.step()`."""

__all__: list[str] = []
