"""One snapshot, from the state that providers list to a durable data file and its manifest.

The modules follow the stages: list, plan, stage, write, publish. When a snapshot is taken is decided in `capture.session.session`.
"""

__all__: list[str] = []
