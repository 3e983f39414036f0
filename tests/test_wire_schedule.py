"""Encoded experts in schedules: the decodes between copies and stages, their execution, and the kernel that decodes.

The kernel runs in Triton's interpreter, in a pytest process of its own (`test_in_the_interpreter`), as in
test_kernels.py.
"""

import types
from dataclasses import replace

import pytest
import torch
from conftest import passes_interpreted
from dualdeadline import kernels, overlap, schedule, simulate, streams, wire
from dualdeadline.cost import CostModel, TransferModel, work_bytes
from dualdeadline.kernels import checks
from dualdeadline.kernels import wire as kernel
from dualdeadline.overlap import blocks
from dualdeadline.schedule import COMPONENTS, DECODES, PIECES, Compute, Copy, Layer, Schedule, with_decode
from dualdeadline.streams.packed import Packed
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import interpreted, outside

RAW = {"gate_up": 8 << 20, "down": 4 << 20}
CODED = {"gate_up": 5_800_000, "down": 2_900_000}
STAGES = {stage: TransferModel(0.002, 3e-10) for stage in ("gate_up", "down", "down_combine", "combine")}
STAGES |= {stage: TransferModel(0.003, 2e-10) for stage in DECODES}
COST = CostModel(TransferModel(0.004, 1.8e-8), STAGES, RAW, silent_ms=0.003, handoff_ms=0.001)
SHAPE = streams.Shape("small", 128, 96, 12)

routed = st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True)
presence = st.sets(st.tuples(st.integers(0, 15), st.sampled_from(COMPONENTS)))
names = st.sampled_from(schedule.NAMES)
every_schedule = pytest.mark.parametrize("name", schedule.NAMES)


@outside
def test_in_the_interpreter():
    assert "skipped" not in passes_interpreted(__file__, "-k", "kernel_")


def plan(name, experts, present=(), sizes=CODED):
    return schedule.block(name, Layer(tuple(experts), frozenset(present)), sizes)


def is_decode(op):
    return isinstance(op, Compute) and op.stage in DECODES


def disjoint(spans):
    ordered = sorted(spans, key=lambda span: span.start_ms)
    return all(one.end_ms <= other.start_ms + 1e-9 for one, other in zip(ordered, ordered[1:]))


def without_decodes(coded):
    """The operations that are left when decodes are taken out, with the places that they then have."""
    kept = [place for place, op in enumerate(coded.ops) if not is_decode(op)]
    moved = {place: number for number, place in enumerate(kept)}
    ops = [coded.ops[place] for place in kept]
    return in_order(replace(op, needs=tuple(moved[need] for need in op.needs if need in moved)) for op in ops)


def in_order(ops):
    """Operations with ascending needs, copies not marked."""
    made = [replace(op, needs=tuple(sorted(op.needs))) for op in ops]
    return tuple(replace(op, encoded=False) if isinstance(op, Copy) else op for op in made)


@given(names, routed, presence)
@settings(deadline=None, max_examples=60)
def test_every_copy_is_decoded_once_and_nothing_else_changes(name, experts, present):
    raw = plan(name, experts, present)
    coded = with_decode(raw)
    decodes = [op for op in coded.ops if is_decode(op)]
    assert all(len(op.needs) == 1 and isinstance(coded.ops[op.needs[0]], Copy) for op in decodes)
    sources = [coded.ops[op.needs[0]] for op in decodes]
    copies = [place for place, op in enumerate(coded.ops) if isinstance(op, Copy)]
    assert sorted(op.needs[0] for op in decodes) == copies
    assert [(op.layer, op.stage, op.experts) for op in decodes] == [
        (copy.layer, f"decode_{copy.piece}", (copy.expert,)) for copy in sources
    ]
    assert coded.bytes == raw.bytes and all(copy.encoded for copy in coded.copies)
    assert in_order(without_decodes(coded)) == in_order(raw.ops) and (coded.name, coded.present) == (
        raw.name,
        raw.present,
    )


@given(names, routed, presence)
@settings(deadline=None, max_examples=60)
def test_a_stage_waits_for_the_decode_of_what_it_waits_for(name, experts, present):
    coded = with_decode(plan(name, experts, present))
    decode_of = {op.needs[0]: place for place, op in enumerate(coded.ops) if is_decode(op)}
    seen = set()
    for place, op in enumerate(coded.ops):
        if isinstance(op, Compute) and not is_decode(op):
            copies = {need for need in op.needs if isinstance(coded.ops[need], Copy)}
            assert {decode_of[need] for need in copies} == {need for need in op.needs if is_decode(coded.ops[need])}
            new = copies - seen  # right before their first stage, in the order of the copies
            assert [coded.ops[each].needs[0] for each in range(place - len(new), place)] == sorted(new)
            seen |= new


@every_schedule
def test_what_is_there_needs_no_decode(name):
    there = plan(name, (3, 5), schedule.ready((3, 5)))
    assert with_decode(there) == there
    half = with_decode(plan(name, (3, 5), schedule.ready((3, 5), ["gate_up"])))
    assert sorted(op.stage for op in half.ops if is_decode(op)) == ["decode_down"] * 2


@pytest.mark.parametrize("ready", range(9))
@every_schedule
def test_simulated_lanes_do_not_overlap_and_decoding_takes_time(name, ready):
    experts = (7, 2, 9, 0, 4, 11, 1, 6)
    raw = plan(name, experts, schedule.ready(experts[:ready]))
    line, shorter = simulate.run(with_decode(raw), COST), simulate.run(raw, COST)
    ops, spans = line.schedule.ops, {span.place: span for span in line.spans}
    assert disjoint(line.lane("link")) and disjoint(line.lane("compute"))
    assert len(spans) == len(ops) and line.bytes == raw.bytes and line.ms >= shorter.ms - 1e-9
    assert line.ms >= max(line.busy_ms("link"), line.busy_ms("compute")) - 1e-9
    for place, op in enumerate(ops):
        assert all(spans[need].end_ms <= spans[place].start_ms + 1e-9 for need in op.needs)
    decoding = sum(spans[place].end_ms - spans[place].start_ms for place, op in enumerate(ops) if is_decode(op))
    assert decoding >= (8 - ready) * (0.003 + 2e-10 * sum(RAW.values())) - 1e-9
    assert line.ms > shorter.ms or ready == 8


@given(names, routed, presence)
@settings(deadline=None, max_examples=40)
def test_decoding_never_makes_a_block_faster_and_costs_at_most_its_own_time(name, experts, present):
    raw = plan(name, experts, present)
    line, shorter = simulate.run(with_decode(raw), COST), simulate.run(raw, COST)
    decodes = [op for op in line.schedule.ops if is_decode(op)]
    most = sum(COST.compute_ms(op, waited=True) for op in decodes)
    assert shorter.ms - 1e-9 <= line.ms <= shorter.ms + most + 1e-9


def test_a_decode_is_charged_for_the_weights_that_it_writes():
    assert work_bytes("decode_expert", 1, RAW) == sum(RAW.values())
    assert [work_bytes(f"decode_{part}", 1, RAW) for part in COMPONENTS] == [RAW[part] for part in COMPONENTS]
    cost = CostModel(TransferModel(0.0, 1e-6), {stage: TransferModel(0.0, 1e-7) for stage in STAGES}, RAW)
    gate_up, down = RAW["gate_up"] * 1e-7, RAW["down"] * 1e-7
    one = simulate.run(with_decode(plan("demand_serial", (3,))), cost)
    assert one.ms == pytest.approx(1e-6 * sum(CODED.values()) + 2 * (gate_up + down))
    two = simulate.run(with_decode(plan("staged_barrier", (3,))), cost)
    assert two.ms == pytest.approx(1e-6 * sum(CODED.values()) + 2 * down)
    with pytest.raises(ValueError, match="no time for stage 'decode_expert'"):
        simulate.run(with_decode(plan("demand_serial", (3,))), replace(cost, stages={"gate_up": STAGES["gate_up"]}))


@every_schedule
def test_only_guesses_that_were_right_are_decoded(name):
    guesses = ((2, "expert", 0.9), (7, "gate_up", 0.5), (3, "down", 0.3))
    raw = schedule.step(name, [Layer((0, 1)), Layer((2, 3), guesses=guesses)], CODED)
    coded = with_decode(raw)
    decoded = [(op.layer, op.experts[0]) for op in coded.ops if is_decode(op)]
    assert set(decoded) == {(0, 0), (0, 1), (1, 2), (1, 3)} and in_order(without_decodes(coded)) == in_order(raw.ops)
    line = simulate.run(coded, replace(COST, before_ms=(0.01,)))
    assert disjoint(line.lane("link")) and disjoint(line.lane("compute")) and len(line.lane("host")) == 2


@pytest.mark.parametrize(
    "decode",
    [
        Compute(0, "decode_down", (1,)),
        Compute(0, "decode_down", (2,), (0,)),
        Compute(1, "decode_down", (1,), (0,)),
        Compute(0, "decode_gate_up", (1,), (0,)),
        Compute(0, "decode_expert", (1,), (0,)),
        Compute(0, "decode_down", (1,), (1,)),
        Compute(0, "decode_down", (), (0,)),
        Compute(0, "decode_down", (1, 2), (0,)),
    ],
)
def test_a_decode_without_its_copy_is_refused(decode):
    copy, other = Copy(0, 1, "down", 4), Compute(0, "before")
    with pytest.raises(ValueError, match=f"operation 2 is {decode.stage} of .* needed: its copy among its needs"):
        Schedule("made up", (copy, other, decode))
    assert Schedule("made up", (copy, other, Compute(0, "decode_down", (1,), (0, 1))))


def packed_work(top_k=8, bits=3, layers=2, shape=SHAPE, pairs=None):
    work = streams.Work(shape, layers=layers, tokens=1, top_k=top_k, kernels="torch")
    routed = [(layer, expert) for layer in range(layers) for expert in work.experts(layer)]
    work.pack(routed if pairs is None else pairs, bits)
    return work


def bits_of(tensor):
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("bits", wire.BITS)
def test_packed_rows_hold_the_records(bits):
    work = packed_work(2, bits, pairs=[(1, 7), (0, 3), (1, 7)])
    packed = work.packed
    assert packed.host.shape == packed.staging.shape == (2, packed.component_bytes["expert"])
    sizes = packed.component_bytes
    assert sizes["expert"] == sizes["gate_up"] + sizes["down"] and set(sizes) == set(PIECES)
    assert all(packed.component_bytes[piece] < work.shape.component_bytes[piece] for piece in PIECES)
    for row, number in ((0, 3), (1, SHAPE.E + 7)):
        for part in COMPONENTS:
            whole = packed.host[row, packed.parts[part]]
            record = wire.WireRecord(whole[: wire.WireRecord(whole).header["bytes"]]).verify()
            assert record.header["bits"] == bits and whole[record.nbytes :].eq(0).all()
            assert torch.equal(bits_of(wire.decode(record)), bits_of(work.host[number, work.parts[part]]))


def test_records_of_unequal_lengths_share_rows(monkeypatch):
    """Behind the shorter ones stand zeros, whatever was in that memory before."""
    work = streams.Work(SHAPE, layers=1, tokens=1, top_k=2, kernels="torch")
    noise = torch.randint(-(2**15), 2**15, work.host[5].shape, dtype=torch.int16)
    work.host[5], work.records[5] = noise.view(torch.bfloat16), noise.view(torch.bfloat16)
    monkeypatch.setattr(torch, "empty", lambda *size, dtype: torch.full(size, 255, dtype=dtype))
    work.pack([(0, 3), (0, 5)])
    packed = work.packed
    for row, expert in ((0, 3), (1, 5)):
        for part in COMPONENTS:
            wanted = wire.encode(work.host[expert, work.parts[part]])
            whole = packed.host[row, packed.parts[part]]
            assert wanted.raw == (expert == 5) and torch.equal(whole[: wanted.nbytes], wanted.data)
            assert len(whole[wanted.nbytes :]) == (0 if wanted.raw else packed.component_bytes[part] - wanted.nbytes)
            assert (expert == 5 or len(whole) > wanted.nbytes) and not whole[wanted.nbytes :].any()
    work.records.fill_(float("nan"))
    for expert in (3, 5):
        work.copy(Copy(0, expert, "expert", packed.component_bytes["expert"], encoded=True))
        work.compute(Compute(0, "decode_expert", (expert,), (0,)))
        assert torch.equal(bits_of(work.records[expert]), bits_of(work.host[expert]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("piece", PIECES)
def test_a_decode_fills_its_slot_and_no_other(piece, dtype):
    work = packed_work(2, shape=replace(SHAPE, dtype=dtype), pairs=[(0, 3), (1, 7), (1, 2)])
    before = work.records.clone()
    work.records.fill_(float("nan"))
    copy = Copy(1, 7, piece, work.packed.component_bytes[piece], encoded=True)
    work.copy(copy)
    assert work.records.isnan().all() and work.packed.staging[:, work.packed.parts[piece]].any(1).sum() == 1
    work.compute(Compute(1, f"decode_{piece}", (7,), (0,)))
    wanted, row = torch.full_like(before, float("nan")), SHAPE.E + 7
    wanted[row, work.parts[piece]] = before[row, work.parts[piece]]
    assert torch.equal(bits_of(work.records), bits_of(wanted))
    assert torch.equal(bits_of(work.host), bits_of(before))


def test_raw_copies_still_reach_their_slots():
    work = packed_work(2, pairs=[(0, 3)])
    before = work.records.clone()
    work.records.fill_(0)
    for expert in (3, 5):
        work.copy(Copy(0, expert, "expert", work.shape.component_bytes["expert"]))
    assert torch.equal(work.records[[3, 5]], before[[3, 5]]) and not work.packed.staging.any()


def test_pieces_that_do_not_fit_are_refused():
    work = packed_work(2, pairs=[(0, 3)])
    coded, raw = work.packed.component_bytes["down"], work.shape.component_bytes["down"]
    for wrong in (
        Copy(0, 3, "down", coded + 1, encoded=True),
        Copy(0, 99, "down", coded, encoded=True),
        Copy(2, 3, "down", coded, encoded=True),
        Copy(0, 3, "down", raw, encoded=True),
        Copy(0, 3, "down", work.packed.component_bytes["gate_up"], encoded=True),
    ):
        with pytest.raises(ValueError, match=f"does not fit; needed: {coded} bytes of one of 12 experts"):
            work.copy(wrong)
    with pytest.raises(ValueError, match="expert 4 of layer 1 has no wire record; needed: a pair given to `pack`"):
        work.copy(Copy(1, 4, "down", coded, encoded=True))
    with pytest.raises(ValueError, match=f"does not fit; needed: {raw} bytes"):
        work.copy(Copy(0, 3, "down", coded))
    with pytest.raises(ValueError, match="expert 3 of layer 1 has no wire record"):
        work.compute(Compute(1, "decode_down", (3,), (0,)))
    unpacked = streams.Work(SHAPE, layers=1, tokens=1, top_k=2, kernels="torch")
    for ask in (
        lambda: unpacked.copy(Copy(0, 3, "down", coded, encoded=True)),
        lambda: unpacked.compute(Compute(0, "decode_down", (3,), (0,))),
        lambda: blocks.block(unpacked, "demand_serial", 0, 0, "coded"),
    ):
        with pytest.raises(ValueError, match="no encoded experts; needed: Work.pack"):
            ask()


def test_a_decode_of_what_did_not_arrive_is_refused():
    work = packed_work(2, pairs=[(0, 3)])
    with pytest.raises(ValueError, match="has 0 bytes; needed: at least a header of 512"):
        work.compute(Compute(0, "decode_down", (3,), (0,)))
    work.copy(Copy(0, 3, "down", work.packed.component_bytes["down"], encoded=True))
    work.packed.staging[0, work.packed.parts["down"]][9_000] ^= 1
    with pytest.raises(ValueError, match="is altered"):
        work.compute(Compute(0, "decode_down", (3,), (0,)))


def coded_setting(ready=(0,), top_k=2, names=schedule.NAMES, way="coded"):
    return overlap.Setting(1, top_k, "torch", "streams", ready=ready, schedules=names, wire=way)


@every_schedule
def test_encoded_blocks_are_bitwise_resident(name):
    work = packed_work()
    for layer in range(2):
        blocks.check(work, coded_setting(tuple(range(9)), 8, (name,)), layer)


@pytest.mark.parametrize("bits", [2, 4])
def test_other_widths_and_tokens_are_bitwise_resident_too(bits):
    work = streams.Work(SHAPE, layers=1, tokens=5, top_k=2, kernels="torch")
    work.pack([(0, expert) for expert in work.experts(0)], bits)
    blocks.check(work, replace(coded_setting((0, 1)), tokens=5))


@every_schedule
def test_raw_and_encoded_blocks_agree_bit_by_bit(name):
    work = packed_work(4)
    expected, lines = work.resident(1), {}
    for way in ("raw", "coded"):
        block = blocks.block(work, name, 1, 1, way)
        work.forget(1, [(expert, part) for _, expert, part in block.present])
        lines[way] = streams.run(block, work)
        assert torch.equal(bits_of(work.out[1]), bits_of(expected)), way
        assert torch.equal(bits_of(work.records), bits_of(work.host))
        assert disjoint(lines[way].lane("link")) and disjoint(lines[way].lane("compute"))
        assert len(lines[way].spans) == len(block.ops)
    raw, coded, packed = lines["raw"], lines["coded"], work.packed.component_bytes
    assert coded.bytes < raw.bytes and in_order(without_decodes(coded.schedule)) == in_order(
        replace(op, bytes=packed[op.piece]) if isinstance(op, Copy) else op for op in raw.schedule.ops
    )
    assert blocks.floor(coded.schedule).ops == tuple(coded.schedule.copies)


def wrong_record(self, place, stage, whole=Packed._decode):
    """Decode what belongs to the next row."""
    whole(
        types.SimpleNamespace(work=self.work, staging=self.host.roll(1, 0), parts=self.parts, slots=self.slots),
        place,
        stage,
    )


@every_schedule
@pytest.mark.parametrize(
    "method, wrong",
    [("_decode", wrong_record), ("_decode", lambda self, place, stage: None)],
    ids=["wrong record", "no decode"],
)
def test_the_check_of_encoded_blocks_can_fail(monkeypatch, name, method, wrong):
    work = packed_work(2, layers=1)
    blocks.check(work, coded_setting(names=(name,)))
    monkeypatch.setattr(Packed, method, wrong)
    with pytest.raises(AssertionError, match=f"{name}, 0 ready: .* values differ"):
        blocks.check(work, coded_setting(names=(name,)))


def test_the_wire_is_named_where_a_study_asks():
    for way in ("raw", "coded"):
        assert coded_setting(way=way).config("small")["wire"] == way
    assert "wire" not in coded_setting(way=None).config("small")
    work = packed_work(2)
    assert blocks.block(work, "demand_serial", 0, 0, "raw") == blocks.block(work, "demand_serial", 0, 0)
    assert not any(is_decode(op) for op in blocks.block(work, "demand_serial", 0, 0).ops)


def test_simulated_blocks_of_encoded_experts():
    """On a slow link fewer bytes win; on a link that costs nothing the decode only adds time."""
    shape = streams.Shape("made up", 1024, 1024, 16)
    assert {part: shape.component_bytes[part] for part in COMPONENTS} == {"gate_up": 4 << 20, "down": 2 << 20}
    routes, sizes = streams.draw_routes(shape, 2, 1, 2, 0), {"gate_up": 3 << 20, "down": 3 << 19}
    for slope, faster in ((1e-6, True), (0.0, False)):
        cost = replace(COST, transfer=TransferModel(0.0, slope), component_bytes=shape.component_bytes)
        raw = blocks.simulated_blocks(shape, routes, coded_setting((0, 2), way="raw"), cost)
        coded = blocks.simulated_blocks(shape, routes, coded_setting((0, 2)), cost, sizes)
        assert raw.keys() == coded.keys() and len(raw) == 2 * len(schedule.NAMES)
        assert all((coded[key] < raw[key]) is faster for key in raw)


@outside
@pytest.mark.skipif(torch.cuda.is_available(), reason="says why a machine without a GPU cannot decode with the kernel")
def test_without_a_gpu_the_reason_is_given():
    ids = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="no GPU is visible"):
        kernel.decode(torch.zeros(1, 4096, dtype=torch.uint8), torch.zeros(1, 8, dtype=torch.bfloat16), ids, ids, ids)


def ids(*values):
    return torch.tensor(values, dtype=torch.int32)


def record_rows(tensors, bits, gap=0):
    """The records of some tensors as rows, and the bytes behind each set."""
    records = [wire.encode(tensor, bits) for tensor in tensors]
    rows = torch.full((len(records), max(record.nbytes for record in records) + gap), 255, dtype=torch.uint8)
    for row, record in zip(rows, records):
        row[: record.nbytes] = record.data
    return records, rows


def strewn(count, seed, *patches):
    """Weights with values at block borders that only a patch can name."""
    tensor = (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()
    words = tensor.view(torch.int16)
    for place in patches:
        words[place] = 0x7F81 + place % 64
    return tensor


@interpreted
def test_kernel_passes_its_check():
    assert checks.check_wire() == {"all but noise coded": True, "equal bits": True, "other slots kept": True}


@interpreted
def test_kernel_check_can_fail(monkeypatch):
    whole = kernel.decode
    monkeypatch.setattr(checks.wire, "BITS", (3,))
    monkeypatch.setattr(kernel, "decode", lambda records, bank, rows, *rest: whole(records, bank, rows.roll(1), *rest))
    assert not checks.check_wire()["equal bits"]


@interpreted
@pytest.mark.parametrize(("bits", "gap", "programs"), [(2, 64, None), (3, 0, 2), (4, 16, None)])
def test_kernel_decodes_block_borders_like_the_reference(bits, gap, programs):
    count = 8 * wire.BLOCK + 8
    patches = [0, 2047, 2048, 4095, 6144, 16383, 16384, count - 1], [2049], [*range(0, count, 101)]
    pruned = strewn(count, 4)
    pruned[::2] = -0.0
    tensors = [*(strewn(count, seed, *places) for seed, places in enumerate(patches)), pruned]
    records, rows = record_rows(tensors, bits, gap)
    assert [record.header["patch_count"] > 0 for record in records] == [True, True, True, False]
    assert records[2].header["patch_count"] > 128 and records[3].header["zero"] and not any(r.raw for r in records)
    bank = torch.full((6, count + 8 * (gap > 0)), 7.0, dtype=torch.bfloat16)
    slots = bank[:, :count]
    assert kernel.decode(rows, slots, ids(3, 0, 2, 1), ids(0, 5, 2, 3), ids(4), bits, programs) is slots
    wanted = torch.full_like(bank, 7.0)
    for slot, tensor in zip((0, 5, 2, 3), (tensors[3], tensors[0], tensors[2], tensors[1])):
        wanted[slot, :count] = tensor
    assert torch.equal(bits_of(bank), bits_of(wanted))
    assert all(torch.equal(bits_of(wire.decode(record)), bits_of(tensor)) for record, tensor in zip(records, tensors))


@interpreted
def test_kernel_decodes_as_many_as_the_count_says_and_skips_ids_out_of_range():
    tensors = [strewn(2048, seed, 5) for seed in range(3)]
    records, rows = record_rows(tensors, 3)
    assert not any(record.raw for record in records)
    for count, rows_of, slots_of, filled in (
        (0, (0, 1), (0, 1), {}),
        (1, (2, 1), (0, 1), {0: 2}),
        (99, (2, 1), (3, 1), {3: 2, 1: 1}),
        (5, (3, -1, 0, 0, 1), (0, 1, 4, -1, 2), {2: 1}),
    ):
        bank = torch.full((4, 32, 64), 7.0, dtype=torch.bfloat16)
        kernel.decode(rows, bank, ids(*rows_of), ids(*slots_of), ids(count))
        wanted = torch.full_like(bank, 7.0)
        for slot, number in filled.items():
            wanted[slot] = tensors[number].view(32, 64)
        assert torch.equal(bits_of(bank), bits_of(wanted)), count


@interpreted
@pytest.mark.parametrize(
    "tensor",
    [
        strewn(4 * 2048 + 77, 0, 0, 4095, 8268),
        strewn(5 * 1643, 1, 9).view(5, 1, 1643),
        strewn(3000, 2).float(),
        strewn(3000, 3).half().view(3, 1000),
        strewn(12, 4).view(3, 4),
        torch.zeros(0, 4, dtype=torch.bfloat16),
        torch.tensor(-0.0, dtype=torch.bfloat16),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}",
)
def test_kernel_decodes_one_record(tensor):
    record = wire.encode(tensor)
    assert record.raw == (tensor.numel() <= 3000)
    found = kernel.decode_record(record, "cpu")
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(bits_of(found), bits_of(tensor))


@interpreted
def test_kernel_names_what_does_not_fit():
    rows, one = torch.zeros(2, 4096, dtype=torch.uint8), ids(1)
    bank = torch.zeros(2, 64, dtype=torch.bfloat16)
    cases = {
        "records are torch.int8": (rows.view(torch.int8), bank, one, one, one),
        r"records are torch.uint8 \(4096,\)": (rows[0], bank, one, one, one),
        "multiples of 16 bytes": (rows.flatten()[:8184].view(2, 4092), bank, one, one, one),
        "bank is torch.float16": (rows, bank.half(), one, one, one),
        r"bank is torch.bfloat16 \(64,\)": (rows, bank[0], one, one, one),
        r"bank is torch.bfloat16 \(0, 64\)": (rows, bank[:0], one, one, one),
        r"bank is torch.bfloat16 \(2, 8, 8\)": (rows, bank.view(2, 8, 8).transpose(1, 2), one, one, one),
        "slots of 60 values, 64 apart": (rows, bank[:, :60], one, one, one),
        "slots of 8 values, 12 apart": (rows, torch.zeros(2, 12, dtype=torch.bfloat16)[:, :8], one, one, one),
        "aligned to 16 bytes": (rows, torch.zeros(65, dtype=torch.bfloat16)[1:].view(1, 64), one, one, one),
        r"bits is 5; needed: one of \(2, 3, 4\)": (rows, bank, one, one, one, 5),
        "rows is torch.int64": (rows, bank, one.long(), one, one),
        "slots is torch.int64": (rows, bank, one, one.long(), one),
        r"count is torch.int32 \(1, 1\)": (rows, bank, one, one, one[None]),
        "lengths are 1, 2, 1; needed: M, M, 1": (rows, bank, one, ids(0, 1), one),
        "lengths are 1, 1, 2; needed: M, M, 1": (rows, bank, one, one, ids(0, 1)),
    }
    for message, given_values in cases.items():
        with pytest.raises(ValueError, match=message):
            kernel.decode(*given_values)
    assert kernels.INTERPRETED and not bank.any()


def test_a_coded_component_of_the_raw_size_is_decoded():
    work = streams.Work(replace(SHAPE, H=64, F=64), layers=1, tokens=1, top_k=2, kernels="torch")
    sizes = work.pack([(0, expert) for expert in work.experts(0)])
    assert sizes["down"] == work.shape.component_bytes["down"]
    overlap.check(work, coded_setting())


@interpreted
def test_kernel_skips_records_of_another_width():
    tensor = (torch.randn(8 * wire.BLOCK) * 0.02).bfloat16()
    record = wire.encode(tensor, 4).data[None]
    bank = torch.full((1, 8, wire.BLOCK), 7.0, dtype=torch.bfloat16)
    zero, one = (torch.tensor([number], dtype=torch.int32) for number in (0, 1))
    assert (kernel.decode(record, bank, zero, zero, one, 3) == 7).all()
    assert torch.equal(bits_of(kernel.decode(record, bank, zero, zero, one, 4).flatten()), bits_of(tensor))
    odd = torch.full((1, 8 * wire.BLOCK // 64, 64), 7.0, dtype=torch.bfloat16)[:, :, :]
    assert torch.equal(bits_of(kernel.decode(record, odd, zero, zero, one, 4).flatten()), bits_of(tensor))
