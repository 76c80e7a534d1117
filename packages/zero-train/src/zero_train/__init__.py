"""Trains language models that do not fit in memory, with one Hydra command.

Composes its siblings (zero-core, zero-offload, zero-nvme, zero-optim-cpu), and owns the configuration, data, models,
progress and report of a run. It owns no mechanism: the siblings shard, place and update.
"""

__version__ = "0.2.0"
