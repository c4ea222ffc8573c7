"""Replays: `capture.enable` puts a training back to a step, changes it as asked, and captures it as a child run."""

__all__: list[str] = []
