"""Runs one training run from its configuration to its last step, and continues ended ones."""
