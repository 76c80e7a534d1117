"""Holds the Hydra tree. `hydra.initialize_config_module("zero_train.conf")` finds its schema and resolvers, too."""

from zero_train.settings import compose as compose
