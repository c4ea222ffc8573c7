"""Captures every N-th step of a training, lazily and asynchronously: `capture.enable(engine, every=50)`."""
