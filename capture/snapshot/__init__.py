"""One snapshot, from the state that providers list to a durable data file and its manifest.

The modules follow the stages: list, plan, stage, write, publish. `capture.session.step_events` decides when a snapshot
is taken.
"""

__all__: list[str] = []
