"""Runs the optimizer's side of a step: `step()`, the default store's update, and states that are carried over."""
