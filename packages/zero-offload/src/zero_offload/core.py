"""Imports what zero_offload takes from zero_core, for all its other modules: no other one imports it."""

from zero_core import ZeroError, handle
from zero_core.active_calls import not_traced, set_compiler, skipped, tensors_of
from zero_core.api import resume
from zero_core.device import available_host_bytes, indexed, sent
from zero_core.errors import UnsupportedOptimizerError, noted
from zero_core.estimate.pool_simulation import Rehearsal, UnitSize
from zero_core.hooks.engine import Engine
from zero_core.layout import UNCUT_BYTES, UnitLayout, owners, round_up
from zero_core.memory import FP32_BYTES, ElementBytes, step_traffic
from zero_core.model.unit_plan import Grouped, cut_experts, plan_units, unit_modules
from zero_core.moe.expert_groups import Stack, find_stacks
from zero_core.moe.nested_checkpoint import Hooks, SavedAround, hidden_from_hooks, hooks_around
from zero_core.optim import single_parameter
from zero_core.optim.contracts import BY_ITSELF, ELEMENTWISE, apart, contract_of, declare, is_muon, over_segments
from zero_core.optim.device_store import DeviceStore
from zero_core.optim.joint import JointOptimizer, kind_of, member_of, members_of, placed
from zero_core.optim.muon import schulz_flop
from zero_core.optim.state_names import KeptStates, kept_states, refuse_one_name
from zero_core.optim.uncut import needs_uncut, uncut_groups
from zero_core.precision import fits, round_to
from zero_core.shard_spec import CHUNK_NUMEL, Initial, Segment, ShardSpec, stretches
from zero_core.store import Arrival, GroupStep, NullObserver, Observer, Pinned, ShardStore, StoreContext, lent_bytes
from zero_core.tensors.inner_tensors import check_initialised
from zero_core.tensors.version_counters import Stamp
from zero_core.tensors.writeback_views import METADATA
from zero_core.unit_memory import unit_memory
from zero_core.util.freed_memory import FreedMemory, SavedBytes, give_memory, take_memory
