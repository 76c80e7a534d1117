"""Runs the optimizer's side of a step, and keeps shards and states on the device (`DeviceStore`) by default."""
