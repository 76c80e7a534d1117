"""Collectives made of messages between peers, against what torch's own leave."""

import threading

import torch
import torch.distributed as dist

from tests import kit
from zero_core.comm.gloo import broken_off


@kit.on_ranks(2)
def test_a_thread_that_waits_in_a_group_that_was_destroyed_is_freed():
    """As at the exit of a program that destroys its groups, while a checkpoint is written in the background."""
    group, failed = dist.new_group(backend="gloo"), threading.Event()
    other, begun = 1 - dist.get_rank(), threading.Event()

    def waits():
        try:
            work = group.recv([torch.empty(1)], other, 7)
            begun.set()
            work.wait()
        except RuntimeError:
            failed.set()

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    assert begun.wait(30)
    dist.barrier()  # both wait
    dist.destroy_process_group(group)
    broken_off(group)
    thread.join(30)
    assert failed.is_set()
