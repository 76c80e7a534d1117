"""Which CPUs an update takes beside a GPU, from a made-up /sys; and that pinned threads are where they were put.

Fails if a hyperthread counts as a core, if two ranks are given one core, or if the launching core gets a thread.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from tests.unit.zero_optim_cpu.test_threads import prepared, printed, updated
from tests.unit.zero_optim_cpu.tiles import same
from zero_optim_cpu import CpuStep, cores
from zero_optim_cpu.cores import Cores, Seat, beside_gpus

pytestmark = pytest.mark.promise("cpu-cores")


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def sys_tree(tmp_path):
    """`make(nodes, per_node, threads)`: nodes with as many physical cores each, siblings numbered as Linux does."""

    def make(nodes=1, per_node=16, threads=1, gpus=(), quota=None):
        total = nodes * per_node
        for node in range(nodes):
            own = [cpu + total * t for t in range(threads) for cpu in range(node * per_node, (node + 1) * per_node)]
            put(tmp_path / f"devices/system/node/node{node}/cpulist", cores.ranges(own))
        for cpu in range(total * threads):
            siblings = ",".join(str(cpu % total + total * t) for t in range(threads))
            put(tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
        for address, node in gpus:
            put(tmp_path / f"bus/pci/devices/{address}/numa_node", str(node))
        if quota is not None:
            put(tmp_path / "fs/cgroup/cpu.max", quota)
        return tmp_path, tuple(range(total * threads))

    return make


def test_one_gpu_in_a_machine_of_sixteen_cores(sys_tree):
    root, every = sys_tree()
    found = beside_gpus([Seat(None, every)], 0, root)
    assert found == Cores(pool=tuple(range(2, 16)), rest=(0, 1), rest_cores=2, node=None)
    assert str(found) == "14 threads on CPU 2-15; launches and I/O on 0-1"


def test_hyperthreads_count_once_and_those_of_the_launching_core_stay_free(sys_tree):
    root, every = sys_tree(per_node=8, threads=2)
    found = beside_gpus([Seat(0, every)], 0, root)
    assert found == Cores(pool=(2, 3, 4, 5, 6, 7), rest=(0, 1, 8, 9), rest_cores=2, node=0)


def test_eight_ranks_on_two_nodes_divide_their_own_nodes(sys_tree):
    root, every = sys_tree(nodes=2, per_node=32, threads=2)
    seats = [Seat(rank // 4, every) for rank in range(8)]
    found = [beside_gpus(seats, rank, root) for rank in range(8)]
    taken = [cpu for each in found for cpu in (*each.pool, *each.rest)]
    assert len(taken) == len(set(taken))
    assert all(len(each.pool) == 6 and each.rest_cores == 2 for each in found)
    for rank, each in enumerate(found):
        assert set(each.pool) | set(each.rest) <= cores.node_cpus(rank // 4, root)
        assert not set(each.pool) & set(each.rest)


def test_what_the_launcher_bound_is_respected_and_not_divided(sys_tree):
    root, _ = sys_tree(nodes=2, per_node=16)
    seats = [Seat(0, tuple(range(8))), Seat(0, tuple(range(8, 16)))]
    assert [beside_gpus(seats, rank, root).pool for rank in (0, 1)] == [tuple(range(2, 8)), tuple(range(10, 16))]
    assert beside_gpus([Seat(0, (4, 5, 6, 7, 20, 21))], 0, root).pool == (6, 7)


@pytest.mark.parametrize(("quota", "pool"), [("800000 100000", 6), ("max 100000", 14), ("50000 100000", 1)])
def test_a_quota_of_the_control_group_limits_the_threads(sys_tree, quota, pool):
    root, every = sys_tree(quota=quota)
    assert len(beside_gpus([Seat(0, every)], 0, root).pool) == pool


def test_the_node_of_a_gpu_is_asked_by_its_pci_address(sys_tree, monkeypatch):
    root, _ = sys_tree(gpus=[("0000:1b:00.0", 1), ("0002:1c:00.0", -1), ("0000:1d:00.0", "?")])
    device = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    assert cores.seat_of(torch.device("cuda", 0), root) == Seat(1, tuple(sorted(os.sched_getaffinity(0))))
    assert cores.pci_address(SimpleNamespace(pci_domain_id=2, pci_bus_id=0x1C, pci_device_id=0)) == "0002:1c:00.0"
    assert cores.numa_node("0002:1c:00.0", root) is None  # -1: one node only
    assert cores.numa_node("0000:1d:00.0", root) is None
    assert cores.numa_node("0000:00:00.0", root) is None
    assert cores.pci_address(SimpleNamespace(name="a torch that does not tell")) is None


def test_pinned_threads_have_the_same_bits_and_the_caller_may_be_anywhere():
    step, tile, segments = prepared(1)
    pinned = CpuStep("split", cores=sorted(os.sched_getaffinity(0)))
    pinned.bind(torch.optim.AdamW([torch.zeros(1)], lr=0.01))
    assert pinned.threads == len(pinned.cores)
    pinned.update(tile, segments, 1.0)
    assert same(tile.parameter, updated())
    assert pinned.chunk_norms_squared(tile.gradient) == step.chunk_norms_squared(tile.gradient)
    assert sum(pinned.chunk_norms_squared(torch.zeros(0))) == 0.0


def test_each_worker_stays_on_its_core_and_the_caller_does_no_work(interpreter):
    program = """
        _, tile, segments = prepared(1)
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[0]})  # as the launching thread is bound: its pool may be elsewhere
        step = CpuStep("split", cores=cpus)
        assert os.sched_getaffinity(0) == {cpus[0]}
        step.bind(torch.optim.AdamW([torch.zeros(1)]))
        step.update(tile, segments, 1.0)
        bound = [os.sched_getaffinity(int(worker)) for worker in workers()]
        assert 0 < len(bound) <= len(cpus), bound
        assert all(len(each) == 1 for each in bound) and len({min(each) for each in bound}) == len(bound), bound
        if os.fork() == 0:
            step.update(tile, segments, 1.0)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    """
    printed(interpreter, program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cores": []}, "each thread needs a CPU of its own"),
        ({"cores": [0, 0]}, "each thread needs a CPU of its own"),
        ({"cores": [0], "threads": 2}, "leave threads out"),
        ({"cores": [1023]}, "may not run on CPU 1023.* leave those out, or leave cores out"),
        ({"cores": [-1]}, "may not run on CPU -1"),
    ],
)
def test_cores_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CpuStep(**options)
