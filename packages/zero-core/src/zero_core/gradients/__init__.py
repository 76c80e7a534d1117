"""Reduces complete gradients into the store, and lets users and ranks look at them before a step."""
