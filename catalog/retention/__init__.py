"""Retention: which checkpoints of a history are kept, by a policy, and the removal of the others.

`policy` turns words into rules, `facts` gathers what is known of each checkpoint, `choice` decides by arithmetic alone,
and `removal` takes checkpoints off the disk so that a listed one always has its bytes. `prune` puts these together.
"""

__all__: list[str] = []
