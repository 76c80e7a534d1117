"""Trains language models that do not fit in memory, from one Hydra command.

Owns the composition of its siblings (zero-core, zero-offload, zero-nvme, zero-optim-cpu), the data, the models, the
progress and the report of a run. Owns no mechanism: what is sharded, placed or updated is decided there.
"""

__version__ = "0.1.0"
