"""Plans of units that compute some rows at a time. Fails if a byte is counted for the wrong rows, or reads per part."""

from dataclasses import replace

import pytest

from tests.unit.zero_offload.sizes import transformer
from zero_offload import Hardware, PlanError, plan
from zero_offload.planning.batches import Batch
from zero_offload.planning.model_sizes import ModelSizes, ParameterSizes, UnitSizes

pytestmark = pytest.mark.promise("plan-rows")

WIDTH, LAYERS, LENGTH = 2048, 24, 256
MODEL = transformer(layers=LAYERS, hidden_size=WIDTH, heads=64, sequence_length=LENGTH)  # without logits
WORKING, INPUT = MODEL.working_bytes_per_token, MODEL.checkpoint_bytes_per_token
GPU = Hardware(
    device="cuda",
    device_gib=24,
    host_gib=256,
    nvme_gib=1000,
    tflops=80,
    device_gbps=900,
    link_gbps=24,
    update_gbps=40,
    nvme_read_gbps=6,
    nvme_write_gbps=4,
)
NVME = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")
TOKENS = 64 * LENGTH


def planned(hardware=GPU, activations="recompute", micro_batch=64, placements=NVME, **options):
    return plan(
        MODEL, hardware, **placements, activations=activations, tokens=TOKENS, micro_batch=micro_batch, **options
    )


def test_the_device_holds_what_a_few_rows_rebuild_and_the_inputs_of_all():
    whole, cut = planned(), planned(rows=32)
    few = 32 * LENGTH
    assert whole.bytes_of("device", "activations") == TOKENS * (LAYERS * INPUT + WORKING)
    beside = 2 * INPUT * (TOKENS - few)  # gradients of the output and of the input
    assert cut.bytes_of("device", "activations") == TOKENS * LAYERS * INPUT + few * WORKING + beside
    sum_and_widened = 2 * 4 * 12 * WIDTH**2  # of a layer, which is one parameter here
    assert cut.bytes_of("device", "buffers") - whole.bytes_of("device", "buffers") == sum_and_widened
    for tier in ("host", "nvme"):
        assert cut.total(tier) == whole.total(tier)
    all_rows = replace(MODEL, norms_by_rows=False)  # by a final norm in fp32
    options = {**NVME, "activations": "recompute", "tokens": TOKENS, "micro_batch": 64, "rows": 4}
    held = TOKENS * INPUT * (LAYERS + 12)
    assert plan(all_rows, GPU, **options).bytes_of("device", "activations") == held
    uneven = planned(rows=24)  # 24, 24 and 16
    assert uneven.batch.parts == 3 and uneven.batch.at_once == 24 * LENGTH


def test_the_logits_are_those_of_a_few_rows_where_the_loss_allows_it():
    sizes = transformer(layers=2, hidden_size=64, vocab_size=32000)
    options = {**NVME, "activations": "host", "tokens": TOKENS, "micro_batch": 64}
    logits, saved = sizes.output_bytes_per_token, 3 * sizes.checkpoint_bytes_per_token  # with the norm's input
    cut, all_logits = (plan(sizes, GPU, **options, rows=1, whole_logits=whole) for whole in (False, True))
    assert cut.bytes_of("device", "activations") == logits * LENGTH + saved * (TOKENS - LENGTH)
    assert all_logits.bytes_of("device", "activations") == logits * TOKENS
    head, block = 64 * 32000, 12 * 64 * 64
    assert cut.bytes_of("device", "buffers") - all_logits.bytes_of("device", "buffers") == 2 * 4 * (head - block)
    extra = cut.prediction.compute_seconds - all_logits.prediction.compute_seconds
    assert extra == pytest.approx(2 * head * TOKENS / 80e12)  # the head computes its logits again in backward
    kept = plan(sizes, GPU, **options | {"activations": "auto"}, rows=1)
    assert set(kept.activations) == {"keep"} and kept.bytes_of("device", "activations") > logits * TOKENS


def test_inputs_on_another_tier_are_all_there_and_one_units_come_back():
    cut = planned(activations="nvme", rows=32)
    few = 32 * LENGTH
    assert cut.bytes_of("nvme", "activations") == LAYERS * INPUT * TOKENS == cut.activation_bytes_per_step
    assert cut.bytes_of("device", "activations") == few * WORKING + 3 * INPUT * (TOKENS - few)
    nbytes, kept = LAYERS * INPUT * TOKENS, planned(rows=32)  # written in forward and read in backward
    assert cut.prediction.busy["nvme"] - kept.prediction.busy["nvme"] == pytest.approx(nbytes / 4e9 + nbytes / 6e9)
    # In forward more parameters go up the link than inputs go down at the same time; in backward both go up.
    assert cut.prediction.busy["link"] - kept.prediction.busy["link"] == pytest.approx(nbytes / 24e9)


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_a_unit_is_read_once_a_direction_and_its_gradient_arrives_once_however_many_parts(rows):
    whole, cut = planned(slots=3), planned(slots=3, rows=rows)
    accumulated = planned(slots=3, micro_batch=rows, accumulate=64 // rows)
    assert cut.account == whole.account
    assert cut.bytes_of("nvme", "gradients") == 2 * MODEL.numel
    assert accumulated.bytes_of("nvme", "gradients") == 4 * MODEL.numel
    for direction in ("forward_read", "backward_read"):
        once = cut.account.moved["nvme"][direction]
        assert once > 0 and accumulated.account.moved["nvme"][direction] == 64 // rows * once
    assert cut.account.moved["nvme"]["accumulate_read"] == 0 < accumulated.account.moved["nvme"]["accumulate_read"]
    assert cut.step_seconds < accumulated.step_seconds


def test_each_part_adds_its_gradient_to_a_sum_on_the_device():
    """Seconds by hand, on a device that has everything, so that no transfer hides them."""
    everything = dict.fromkeys(NVME, "device")
    roomy = Hardware(**GPU.to_dict() | {"device_gib": 200})
    whole, cut = (planned(roomy, placements=everything, rows=rows) for rows in (None, 4))
    moved = MODEL.numel * (16 * (2 + 4) + 15 * (4 + 4 + 4))  # widened; then two read, and their sum written
    assert cut.step_seconds - whole.step_seconds == pytest.approx(moved / 900e9)
    assert cut.prediction.compute_seconds == whole.prediction.compute_seconds
    unknown = Hardware(**{key: value for key, value in GPU.to_dict().items() if key != "device_gbps"})
    assert planned(unknown).prediction is not None and planned(unknown, rows=4).prediction is None


def test_auto_takes_all_rows_where_they_fit_and_fewer_where_the_device_is_small():
    assert planned(rows="auto").rows is None

    def with_room_for(nbytes):
        return Hardware(**GPU.to_dict() | {"device_gib": nbytes / (1 << 30), "device_reserved_gib": 0})

    whole, least = (planned(activations="nvme", rows=rows).total("device") for rows in (None, 1))
    assert planned(with_room_for(whole), activations="nvme", rows="auto").rows is None
    small = with_room_for(whole - 1)
    with pytest.raises(PlanError, match="device tier needs"):
        planned(small, activations="nvme")
    found = planned(small, activations="nvme", rows="auto")
    assert found.rows == 32
    assert found.held == planned(small, activations="nvme", rows=32).held
    assert planned(with_room_for(least), activations="nvme", rows="auto").total("device") == least
    with pytest.raises(PlanError, match="device tier needs") as refused:
        planned(with_room_for(least - 1), activations="nvme", rows="auto")
    assert refused.value.missing_bytes == 1  # of the fewest rows


def test_auto_cuts_where_the_memory_hides_more_than_the_sums_cost():
    """States that the placement leaves to the planner take what fewer rows leave on the device."""
    free = dict.fromkeys(NVME, "auto")
    tight = Hardware(**GPU.to_dict() | {"device_gib": 12, "device_reserved_gib": 1, "host_gib": 8})
    by_rows = {
        rows: planned(tight, "host", placements=free, rows=rows).step_seconds for rows in (None, 32, 16, 8, 4, 2, 1)
    }
    found = planned(tight, "host", placements=free, rows="auto")
    assert found.rows == min(by_rows, key=by_rows.get) == 8 and found.step_seconds == by_rows[8]
    assert by_rows[1] > by_rows[None] > 1.1 * by_rows[16]


def test_the_sum_is_of_what_a_module_trains():
    """Adapters beside a frozen base, as LoRA makes them: only they have a gradient, in the module that recomputes."""

    def unit(name, numel, beside, **options):
        return UnitSizes(name, (ParameterSizes(name, numel),), beside=beside, **options)

    blocks = [
        each
        for i in range(3)
        for each in (
            unit(f"layers.{i}", 1 << 24, i, trained=False),
            unit(f"layers.{i}:trained", 1 << 16, i, is_block=False),
        )
    ]
    sizes = ModelSizes((*blocks, unit("head", 1 << 22, None, is_block=False)), 128, 1024, 2048)
    policies = ["recompute", "keep", "recompute", "keep", "keep", "keep", "keep"]
    assert sizes.summed(policies, Batch(micro_batch=2, rows=1)) == [[1 << 16], [1 << 16]]
    assert sizes.summed(policies, Batch(micro_batch=2)) == []
    options = {**NVME, "tokens": 4096, "micro_batch": 4, "activations": "recompute"}
    whole, cut = (plan(sizes, GPU, **options, rows=rows) for rows in (None, 1))
    assert cut.bytes_of("device", "buffers") - whole.bytes_of("device", "buffers") == 2 * (4 << 16)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 4, "micro_batch": None}, "rows=4 without micro_batch"),
        ({"rows": 4, "activations": "keep"}, "needs units that are recomputed"),
        ({"rows": "auto", "activations": ["keep"] * LAYERS}, "needs units that are recomputed"),
        ({"rows": 0}, "rows=0 must be a whole number, 1 or more"),
        ({"rows": True}, "rows=True must be a whole number, 1 or more"),
        ({"rows": "four"}, "rows='four' must be a whole number, 1 or more"),
        ({"micro_batch": 0}, "micro_batch=0 must be a whole number, 1 or more"),
        ({"tokens_at_once": 4, "micro_batch": None}, "tokens_at_once=4 without micro_batch"),
        ({"tokens_at_once": "auto", "activations": "keep"}, "needs units that are recomputed"),
        ({"tokens_at_once": 0}, "tokens_at_once=0 must be a whole number, 1 or more"),
    ],
)
def test_rows_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        planned(**options)


def test_attention_takes_whole_rows_and_mlps_and_the_head_take_a_part():
    sizes = transformer(layers=2, hidden_size=64, vocab_size=1000)
    options = {**NVME, "activations": "recompute", "tokens": 8 * 4096, "micro_batch": 8}
    whole, cut, both = (
        plan(sizes, GPU, **options, **more)
        for more in ({}, {"tokens_at_once": 512}, {"tokens_at_once": 512, "rows": 2})
    )
    inputs, inside = 2 * sizes.checkpoint_bytes_per_token * 8 * 4096, sizes.part_bytes_per_token
    attention = sizes.whole_bytes_per_token
    held = max(attention * 8 * 4096, attention * 8 * 4096 * 9 // 10 + inside * 8 * 512)
    assert cut.bytes_of("device", "activations") - inputs == held
    few = max(attention * 2 * 4096, attention * 2 * 4096 * 9 // 10 + inside * 2 * 512)
    beside = 2 * sizes.checkpoint_bytes_per_token * 6 * 4096
    head = sizes.output_bytes_per_token * 2 * 512 + 3 * sizes.checkpoint_bytes_per_token * (8 * 4096 - 2 * 512)
    assert both.bytes_of("device", "activations") - inputs == max(few + beside, head)
    logits = sizes.output_bytes_per_token * 8 * 4096
    assert whole.bytes_of("device", "activations") - inputs == logits > cut.bytes_of("device", "activations")
    for direction in ("forward_read", "backward_read"):
        assert cut.account.moved["nvme"][direction] == whole.account.moved["nvme"][direction]
    assert ("tokens of a row at a time in an MLP", "512 of 4096") in cut.facts()
    assert plan(sizes, GPU, **options, tokens_at_once=4096).tokens_at_once is None
    assert plan(sizes, **options, tokens_at_once="auto").tokens_at_once is None  # nothing is known


def test_auto_takes_parts_of_rows_only_where_no_number_of_rows_fits():
    options = {"activations": "recompute", "rows": "auto", "tokens_at_once": "auto"}

    def found(nbytes):
        small = Hardware(**GPU.to_dict() | {"device_gib": nbytes / (1 << 30), "device_reserved_gib": 0})
        return planned(small, **options, placements=NVME, micro_batch=1)

    cuts = (None, 8192, 4096, 2048)
    totals = {tokens: planned(micro_batch=1, tokens_at_once=tokens).total("device") for tokens in cuts}
    assert totals[8192] > totals[None] > totals[4096] == totals[2048]  # gradients are added in fp32; attention is whole
    for room, expected in ((totals[None], None), (totals[None] - 1, 4096), (totals[4096], 4096)):
        assert found(room).tokens_at_once == expected
    with pytest.raises(PlanError, match="device tier needs"):
        found(totals[4096] - 1)
    by_rows = planned(GPU, "recompute", **{k: v for k, v in options.items() if k != "activations"})
    assert by_rows.tokens_at_once is None
