"""The lossless wire format on the CPU: records there and back, damage, the store, and the designs compared."""

import json
import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from dualdeadline import wire
from dualdeadline.wire import BITS, BLOCK, Store, WireRecord, codec, space, speed
from dualdeadline.wire.format import ALIGN, HEADER, SHAPE, VERSION, WORDS, block_bytes, header_sum
from hypothesis import given, settings
from hypothesis import strategies as st

COMPONENT = 2**19  # values in 1 MiB
NAMES = [f"layer {number}" for number in range(9)]
widths = pytest.mark.parametrize("bits", BITS)
shapes = st.sampled_from([
    (), (0,), (3, 0, 2), (1,), (7,), (1791,), (2047,), (2048,), (2049,), (3, 683), (5, 1, 821), (4097,), (61, 101),
    (2, 3, 1024), (1, 1, 1, 1, 1, 1, 1, 6145), (2, 2, 2, 2, 2, 2, 2, 65)])


def tensor_of(words):
    return torch.from_numpy(np.asarray(words, np.uint16).view(np.int16).copy()).view(torch.bfloat16)


def words_of(tensor):
    return tensor.contiguous().flatten().view(torch.int16).numpy().view(np.uint16)


def narrow(count, seed=0, exponents=(118, 123)):
    """16-bit words with exponents of a small range, any sign and mantissa."""
    draw = np.random.default_rng(seed)
    signs, mantissas = draw.integers(0, 2, count) << 15, draw.integers(0, 128, count)
    return (signs | draw.integers(*exponents, count) << 7 | mantissas).astype(np.uint16)


def normal(count, seed=0):
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def same(found, wanted):
    integer = {2: torch.int16, 4: torch.int32}[wanted.element_size()]
    return (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and torch.equal(
        found.view(integer), wanted.contiguous().view(integer))


def there_and_back(tensor, bits=3, threads=None):
    """The record of a tensor, once its size, header and values are right."""
    record = wire.encode(tensor, bits)
    assert record.nbytes == record.data.numel() == record.header["bytes"] and record.nbytes % ALIGN == 0
    assert record.shape == tuple(tensor.shape) and record.dtype == tensor.dtype and record.verify() is record
    assert record.header["count"] == tensor.numel() and record.header["bits"] == (0 if record.raw else bits)
    assert same(wire.decode(record, threads=threads), tensor) and same(wire.decode(record.data), tensor)
    return record


@st.composite
def tensors(draw):
    """Any bit patterns, strewn among values of common exponents, in any share."""
    shape, seed = draw(shapes), draw(st.integers(0, 2**32 - 1))
    palette = np.array(draw(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=30)), np.uint16)
    first, share = draw(st.integers(0, 250)), draw(st.sampled_from([0.0, 0.001, 0.03, 0.5, 1.0]))
    source, count = np.random.default_rng(seed), math.prod(shape)
    words = narrow(count, seed, (first, draw(st.integers(first + 1, 256))))
    return tensor_of(np.where(source.random(count) < share, source.choice(palette, count), words)).view(shape)


@given(tensors(), st.sampled_from(BITS))
@settings(deadline=None, max_examples=80)
def test_any_bits_come_back(tensor, bits):
    there_and_back(tensor, bits)


@widths
def test_every_bit_pattern_comes_back_from_coded_records(bits):
    places = np.random.default_rng(0).permutation(100_000)[:4096]
    for first in range(0, 2**16, 4096):
        words = narrow(100_000)
        words[places] = np.arange(first, first + 4096)
        assert not there_and_back(tensor_of(words), bits).raw


def strewn(words, every, *values):
    """A copy with some values at every so many places."""
    out = words.copy()
    for start, value in enumerate(values):
        out[start::every] = value
    return out


KINDS = {  # name -> words, and what the header must say
    "normal": (words_of(normal(50_001)), lambda h: h["escape_count"] > 0 and h["zero"] == 0),
    "NaN payloads": (strewn(narrow(50_001), 601, 0x7F81, 0x7FC0, 0xFFFF, 0xFF81, 0x7FAA),
                     lambda h: h["patch_count"] > 400),
    "infinities": (strewn(narrow(50_001), 997, 0x7F80, 0xFF80), lambda h: h["patch_count"] == 102),
    "few zeros": (strewn(narrow(50_001, exponents=(112, 128)), 997, 0x0000, 0x8000),
                  lambda h: h["patch_count"] == 102 and not h["zero"]),
    "subnormals": (narrow(50_001, exponents=(0, 1)), lambda h: not (h["base"] or h["zero"] or h["escape_count"])),
    "pruned": (narrow(50_001) * (np.arange(50_001) % 2).astype(np.uint16),
               lambda h: h["zero"] and not h["patch_count"]),
    "pruned, signed zeros": (strewn(narrow(50_001), 3, 0x0000, 0x8000), lambda h: h["zero"] and not h["patch_count"]),
    "constant": (np.full(50_001, 0x3F00, np.uint16), lambda h: h["escape_count"] == 0 == h["patch_count"]),
    "all NaN": (narrow(50_001, exponents=(255, 256)), lambda h: h["escape_count"] == 0),
    "highest exponents": (narrow(50_001, exponents=(249, 256)), lambda h: h["base"] + 2 ** h["bits"] <= 257),
    "lowest exponents": (narrow(50_001, exponents=(0, 7)), lambda h: h["base"] < 8 and not h["patch_count"]),
    "wide": (strewn(narrow(50_001), 100, *(exponent << 7 for exponent in range(1, 240, 79))),
             lambda h: h["patch_count"] > 1900),
}


@widths
@pytest.mark.parametrize("kind", KINDS)
def test_awkward_values_travel_coded_and_come_back(kind, bits):
    words, expected = KINDS[kind]
    record = there_and_back(tensor_of(words), bits)
    assert not record.raw and expected(record.header), record.header


@pytest.mark.parametrize("gap", [-9, -3, 3, 9, 20])
@widths
def test_escapes_on_both_sides_of_the_run(bits, gap):
    """Rare exponents at a distance from the run, and some that only a patch can name."""
    words = narrow(30_000, exponents=(120, 120 + 2**bits - 1))
    near = 119 + gap if gap < 0 else 119 + 2**bits - 1 + gap
    words[::101] = near << 7 | 5
    for pruned in (False, True):
        if pruned:
            words[1::2] = 0x8000
        record = there_and_back(tensor_of(words), bits)
        assert record.header["zero"] == pruned and record.header["escape_count"] > 0
        assert (record.header["patch_count"] > 0) == (gap == 20)


@widths
def test_patches_at_block_borders_are_listed_in_order(bits):
    words = narrow(6 * BLOCK + 77, exponents=(110, 127))
    places = [0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 3 * BLOCK, 5 * BLOCK - 1, 5 * BLOCK, 6 * BLOCK, len(words) - 1]
    words[places] = np.arange(0x7F80, 0x7F80 + len(places))
    record = there_and_back(tensor_of(words), bits)
    head, data = record.header, record.data.numpy()
    starts = data[HEADER : HEADER + 4 * 7].view(np.int32)
    at = head["patches"]
    end = at + 4 * head["patch_count"]
    assert data[at:end].view(np.int32).tolist() == places
    assert data[end : end + 2 * len(places)].view(np.uint16).tolist() == words[places].tolist()
    assert sorted(np.flatnonzero(starts < 0)) == sorted({place // BLOCK for place in places})
    before = np.where(starts < 0, -1 - starts, starts)
    assert before[0] == 0 and (np.diff(before) > 0).all() and before[-1] < head["escape_count"]
    assert head["escapes"] - head["body"] == 7 * block_bytes(bits)


def test_too_many_patches_travel_raw():
    for count, raw in ((codec.MOST_PATCHES, False), (codec.MOST_PATCHES + 1, True)):
        words = narrow(200_000)
        words[np.random.default_rng(1).permutation(len(words))[:count]] = 0x7F80
        record = there_and_back(tensor_of(words))
        assert record.raw is raw and record.header["patch_count"] == (0 if raw else count)


@widths
def test_chunks_meet_without_a_seam(bits):
    """Patches and escapes right where one piece of work ends and the next one begins."""
    words = words_of(normal(codec.CHUNK + BLOCK + 3)).copy()
    words[codec.CHUNK - 2 : codec.CHUNK + 2] = 0x7FC1, 0x0001, 0x8000, 0xFF80
    words[[0, -1]] = 0x7F80
    record = there_and_back(tensor_of(words), bits)
    assert not record.raw and record.header["patch_count"] >= 5


def test_threads_do_not_change_the_values():
    words = words_of(normal(codec.CHUNK + 5 * BLOCK - 1)).copy()
    words[7::9001] = 0x7FC5
    record = wire.encode(tensor_of(words))
    found = [wire.decode(record, threads=threads) for threads in (1, 2, 3)]
    assert all(same(each, tensor_of(words)) for each in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 1001)])
def test_other_floats_travel_raw(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if tensor.numel() > 3:
        tensor.view(-1)[:4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-7]).to(dtype)
    record = there_and_back(tensor)
    assert record.raw and record.nbytes == -(-(HEADER + tensor.nbytes) // ALIGN) * ALIGN


def test_what_memory_order_and_ownership_do_not_change():
    base = normal(6 * BLOCK).view(96, 128)
    for tensor in (base.t(), base[:, ::2], torch.nn.Parameter(base)):
        copy = tensor.detach().clone()
        there_and_back(tensor.detach())
        found = wire.decode(wire.encode(tensor))
        found += 1
        assert same(tensor.detach(), copy) and not found.requires_grad
    for tensor in (base, base.float()):  # writing to what was decoded leaves the record whole
        record = wire.encode(tensor)
        wire.decode(record).fill_(7)
        assert same(wire.decode(record), tensor)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float64, torch.int16])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=f"dtype is {dtype}; needed: bfloat16, float16 or float32"):
        wire.encode(torch.zeros(8).to(dtype))


@pytest.mark.parametrize("bits", [0, 1, 5, -3, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_widths_are_refused(bits, dtype):
    with pytest.raises(ValueError, match=rf"bits is {bits}; needed: one of \(2, 3, 4\)"):
        wire.encode(torch.zeros(5000, dtype=dtype), bits)


def test_too_many_dimensions_and_bytes_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="at most .* bytes and 8 dimensions"):
        wire.encode(torch.zeros((1,) * 9, dtype=torch.bfloat16))
    monkeypatch.setattr(codec, "LARGEST", 1000)
    assert wire.encode(torch.zeros(500, dtype=torch.bfloat16)).header["count"] == 500
    with pytest.raises(ValueError, match="of 1002 bytes; needed: at most 1000 bytes"):
        wire.encode(torch.zeros(501, dtype=torch.bfloat16))


def hard():
    """Contents of 1 MiB that do not get smaller, or that a sample of every second value does not show."""
    noise = np.random.default_rng(0).integers(0, 2**16, COMPONENT).astype(np.uint16)
    blocks = (np.arange(COMPONENT) // BLOCK).astype(np.uint16) << 7 | noise & 0x807F
    hidden = narrow(COMPONENT)
    hidden[1::2] = 0x0100
    behind = narrow(COMPONENT)
    behind[1::2] = 125 << 7
    many = narrow(COMPONENT)
    many[:: COMPONENT // codec.MOST_PATCHES] = 0xFF80
    return {"noise": noise, "a new exponent per block": blocks, "hidden patches": hidden, "hidden escapes": behind,
            "many patches": many, "all escaped": narrow(COMPONENT, exponents=(100, 119)), "sorted": np.sort(noise),
            "constant": np.zeros(COMPONENT, np.uint16)}


@pytest.mark.parametrize("name", hard())
def test_no_content_gets_larger_than_a_header(name):
    words = hard()[name]
    for bits in BITS:
        record = wire.encode(tensor_of(words), bits)
        assert record.bits_per_weight == 8 * record.nbytes / COMPONENT <= 16.1
        assert same(wire.decode(record, threads=2), tensor_of(words))


def test_normal_weights_need_11_bits():
    found = {bits: wire.encode(normal(COMPONENT), bits).bits_per_weight for bits in BITS}
    assert found[3] <= 11.2 and found[3] == min(found.values())
    assert math.isinf(wire.encode(normal(0)).bits_per_weight)


@pytest.fixture(scope="module")
def damaged():
    """A record with all sections, and the first and last byte of each."""
    words = narrow(5 * BLOCK + 300, exponents=(116, 126))
    words[::501] = 0x7F80
    record = wire.encode(tensor_of(words))
    head = record.header
    assert head["escape_count"] and head["patch_count"] and not record.raw
    ends = {"starts": head["starts"] + 4 * 6, "body": head["escapes"],
            "escapes": head["escapes"] + (head["escape_count"] + 1) // 2,
            "patches": head["patches"] + 6 * head["patch_count"]}
    spots = {name: {head[name], (head[name] + end) // 2, end - 1} for name, end in ends.items()}
    spots |= {"header": {*range(4 * len(WORDS)), 4 * SHAPE, 4 * SHAPE + 4, HEADER - 1},
              "padding": {ends["starts"], head["body"] - 1, ends["escapes"], head["patches"] - 1, ends["patches"],
                          record.nbytes - 1}}
    assert ends["starts"] < head["body"] and ends["patches"] < record.nbytes
    return record, spots


@pytest.mark.parametrize("section", ["header", "starts", "body", "escapes", "patches", "padding"])
def test_every_wrong_bit_is_refused_by_name(damaged, section):
    record, spots = damaged
    for place in spots[section]:
        for bit in range(8):
            data = record.data.clone()
            data[place] ^= 1 << bit
            with pytest.raises(ValueError, match="^down of layer 7 (is altered|has an altered|has version|is no wire)"):
                WireRecord(data).verify("down of layer 7")
            with pytest.raises(ValueError, match="^record "):
                wire.decode(data)


def test_wrong_lengths_and_foreign_bytes_are_refused(damaged):
    record, _ = damaged
    size, data = record.nbytes, record.data
    cases = {
        f"has {size - 1} bytes; needed: {size}": data[:-1],
        f"has {size - ALIGN} bytes; needed: {size} .truncated": data[:-ALIGN],
        f"has {HEADER} bytes; needed: {size}": data[:HEADER],
        "has 511 bytes; needed: at least a header of 512": data[:511],
        "has 0 bytes; needed: at least a header of 512": data[:0],
        f"has {2 * size} bytes; needed: {size} .truncated, or glued": torch.cat([data, data]),
        f"has {size + 1} bytes; needed: {size}": torch.cat([data, data[-1:]]),
        r"no wire record: it starts with b'PK\\x03\\x04": torch.tensor([80, 75, 3, 4] * 1024, dtype=torch.uint8),
        r"no wire record: it starts with b'\\x00": torch.zeros(4096, dtype=torch.uint8),
        "no wire record": data[HEADER:],
    }
    for message, wrong in cases.items():
        with pytest.raises(ValueError, match=f"^gate of 3 (is )?{message}"):
            WireRecord(wrong).verify("gate of 3")
        with pytest.raises(ValueError, match=message):
            wire.decode(wrong)


def test_another_version_is_refused(damaged):
    record, _ = damaged
    words = record.words().copy()
    words[WORDS.index("version")] = VERSION + 1
    words[WORDS.index("header_sum")] = header_sum(words)
    data = record.data.clone()
    data[:HEADER] = torch.from_numpy(words.view(np.uint8))
    with pytest.raises(ValueError, match=f"^it has version {VERSION + 1}; needed: {VERSION}$"):
        WireRecord(data).verify("it")


def test_verification_can_be_left_out(damaged):
    record, _ = damaged
    data = record.data.clone()
    data[-1] ^= 1
    assert same(wire.decode(data, verify=False), wire.decode(record))


@pytest.mark.parametrize("workers", [1, 3])
def test_many_are_encoded_in_their_order(workers):
    sizes = [50_000, 10, 0, 9_000, 200_000, 3, 70_000, 1, 2_000, 5_000, 80_000, 12]
    tensors = [(f"{number % 5}", normal(size, number)) for number, size in enumerate(sizes)]
    taken = []
    stream = wire.encode_many((taken.append(item) or item for item in tensors), 2, workers)
    found = [next(stream)]
    assert len(taken) <= 2 * workers + 1 < len(tensors)  # the others need not lie in memory yet
    found += stream
    assert [name for name, _ in found] == [name for name, _ in tensors]
    for (_, record), (_, tensor) in zip(found, tensors, strict=True):
        assert torch.equal(record.data, wire.encode(tensor, 2).data)
    with pytest.raises(ValueError, match="torch.int8"):
        list(wire.encode_many([("a", normal(9)), ("b", torch.zeros(3, dtype=torch.int8))], workers=workers))


def test_the_check_of_the_notebook_can_fail(monkeypatch):
    found = speed.check_codec()
    assert found["equal"] == found["tensors"] and found["refused"] == found["damaged"] > 0
    assert 0 < found["raw"] < found["tensors"]
    monkeypatch.setattr(speed, "decode", lambda record: torch.zeros(1))
    found = speed.check_codec()
    assert found["equal"] < found["tensors"] and found["refused"] == 0


def component(name):
    return normal(20_000 + 300 * NAMES.index(name), NAMES.index(name)).view(-1, 20)


class Loader:
    """Loads components, and is interrupted at one of them."""

    def __init__(self, stop=None):
        self.stop, self.loaded = stop, []

    def __call__(self, name):
        if name == self.stop:
            raise KeyboardInterrupt
        self.loaded.append(name)
        return component(name)


def never(name):
    raise AssertionError(f"{name} was loaded again")


def journal(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def killed(folder):
    """Names that a build recorded before it was interrupted."""
    with pytest.raises(KeyboardInterrupt):
        Store.build(folder, "abc", NAMES, Loader(NAMES[-1]), workers=1)
    found = [line["name"] for line in journal(folder)[1:]]
    assert 2 <= len(found) < len(NAMES)
    return found


def complete(store, bits=3):
    """Whether every component is there, bit by bit, at its place in the file."""
    ends = [start + size for start, size in store.index.values()]
    return (list(store.index) == NAMES and len(store) == len(NAMES) and store.bits == bits
            and all(start % ALIGN == 0 for start, _ in store.index.values())
            and max(ends) == store.bytes == (store.folder / "records.bin").stat().st_size
            and all(same(wire.decode(store[name]), component(name)) for name in NAMES)
            and all(torch.equal(store[name].data, wire.encode(component(name), bits).data) for name in NAMES))


def test_a_store_is_built_once(tmp_path):
    load = Loader()
    assert complete(Store.build(tmp_path / "new" / "store", "abc", iter(NAMES), load))
    assert load.loaded == NAMES
    assert complete(Store(tmp_path / "new" / "store", "abc"))
    assert complete(Store.build(tmp_path / "new" / "store", "abc", NAMES, never))
    assert sorted(path.name for path in (tmp_path / "new" / "store").iterdir()) == ["lock", "records.bin", "store.json"]


def test_an_empty_store(tmp_path):
    assert len(Store.build(tmp_path, "abc", [], never)) == 0 == Store(tmp_path, "abc").bytes


def test_a_killed_build_goes_on(tmp_path):
    recorded = killed(tmp_path)
    with pytest.raises(FileNotFoundError, match="no finished store; needed: Store.build"):
        Store(tmp_path, "abc")
    load = Loader()
    assert complete(Store.build(tmp_path, "abc", NAMES, load))
    assert load.loaded == [name for name in NAMES if name not in recorded]


def test_a_torn_line_of_the_journal_is_loaded_again(tmp_path):
    recorded = killed(tmp_path)
    text = (tmp_path / "journal.jsonl").read_text()
    (tmp_path / "journal.jsonl").write_text(text[:-9])
    load = Loader()
    assert complete(Store.build(tmp_path, "abc", NAMES, load))
    assert load.loaded == [name for name in NAMES if name not in recorded[:-1]]


def test_what_stands_behind_the_last_recorded_byte_is_overwritten(tmp_path):
    recorded = killed(tmp_path)
    with open(tmp_path / "records.bin", "ab") as data:
        data.write(b"half a record" * 100_000)
    load = Loader()
    assert complete(Store.build(tmp_path, "abc", NAMES, load)) and not set(load.loaded) & set(recorded)


def test_a_recorded_name_whose_bytes_are_missing_is_loaded_again(tmp_path):
    recorded = killed(tmp_path)
    with open(tmp_path / "records.bin", "r+b") as data:
        data.truncate((tmp_path / "records.bin").stat().st_size - 1)
    load = Loader()
    assert complete(Store.build(tmp_path, "abc", NAMES, load))
    assert load.loaded == [name for name in NAMES if name not in recorded[:-1]]


@pytest.mark.parametrize("changed", [{"key": "other"}, {"bits": 4}])
def test_a_killed_build_of_something_else_is_not_continued(tmp_path, changed):
    killed(tmp_path)
    load = Loader()
    store = Store.build(tmp_path, **({"key": "abc", "bits": 3} | changed), names=NAMES, load=load)
    assert complete(store, changed.get("bits", 3)) and load.loaded == NAMES


def test_a_truncated_file_is_refused_and_built_again(tmp_path):
    size = Store.build(tmp_path, "abc", NAMES, component).bytes
    with open(tmp_path / "records.bin", "r+b") as data:
        data.truncate(size - 1)
    with pytest.raises(ValueError, match=rf"records.bin has {size - 1} bytes; needed: {size} \(truncated"):
        Store(tmp_path, "abc")
    load = Loader()
    assert complete(Store.build(tmp_path, "abc", NAMES, load)) and load.loaded == NAMES[-1:]  # the others are whole


@pytest.mark.parametrize("offset", [0, 8, 40, HEADER, 3000, -1])
def test_an_altered_record_is_refused_by_name(tmp_path, offset):
    start, size = Store.build(tmp_path, "abc", NAMES, component).index[NAMES[4]]
    with open(tmp_path / "records.bin", "r+b") as data:
        data.seek(start + offset % size)
        (byte,) = data.read(1)
        data.seek(start + offset % size)
        data.write(bytes([byte ^ 16]))
    store = Store(tmp_path, "abc")
    with pytest.raises(ValueError, match=f"record '{NAMES[4]}' of .*{tmp_path.name}"):
        store[NAMES[4]]
    assert all(same(wire.decode(store[name]), component(name)) for name in NAMES if name != NAMES[4])


def test_another_key_format_or_name_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no finished store"):
        Store(tmp_path, "abc")
    store = Store.build(tmp_path, "abc", NAMES, component)
    with pytest.raises(KeyError, match="layer 99"):
        store["layer 99"]
    with pytest.raises(ValueError, match="format 1 and key abc; needed: 1 and xyz"):
        Store(tmp_path, "xyz")
    said = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps(said | {"format": 2}))
    with pytest.raises(ValueError, match="format 2 and key abc; needed: 1 and abc"):
        Store(tmp_path, "abc")


@pytest.mark.parametrize("changed", [{"key": "other"}, {"bits": 2}, {"bits": 9}])
def test_a_finished_store_of_something_else_stays(tmp_path, changed):
    wanted = {"key": "abc", "bits": 3, "names": NAMES}
    Store.build(tmp_path, **wanted, load=component)
    with pytest.raises(ValueError, match="or another folder|each once, bits of"):
        Store.build(tmp_path, **wanted | changed, load=never)
    assert complete(Store(tmp_path, "abc"))


def test_other_names_of_the_same_checkpoint_load_only_what_is_new(tmp_path):
    Store.build(tmp_path, "abc", NAMES[:4], component)
    for some in (NAMES[:2], NAMES[:4][::-1]):
        assert len(Store.build(tmp_path, "abc", some, never)) == 4
    load = Loader()
    assert complete(Store.build(tmp_path, "abc", NAMES, load)) and load.loaded == NAMES[4:]


def test_a_resumed_build_makes_damaged_records_again(tmp_path):
    def fail(name):
        if name == NAMES[5]:
            raise KeyboardInterrupt
        return component(name)

    with pytest.raises(KeyboardInterrupt):
        Store.build(tmp_path, "abc", NAMES, fail, workers=1)
    with open(tmp_path / "records.bin", "r+b") as data:
        data.write(bytes(4096))
    load = Loader()
    assert complete(Store.build(tmp_path, "abc", NAMES, load)) and load.loaded == NAMES


def test_builds_of_one_folder_wait_for_each_other(tmp_path):
    slow = lambda name: (time.sleep(0.02), component(name))[1]  # noqa: E731
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda load: Store.build(tmp_path, "abc", NAMES, load), (slow, slow)))
    assert all(complete(store) for store in found)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40).filter(any))
@settings(deadline=None, max_examples=40)
def test_prefix_codes_need_at_most_one_bit_more_than_the_entropy(counts):
    counts = np.array(counts)
    assert space.entropy(counts) - 1e-9 <= space.huffman(counts) <= space.entropy(counts) + 1 + 1e-9


def test_code_lengths_by_hand():
    assert space.huffman(np.array([7, 0, 7])) == 1 == space.entropy(np.array([7, 0, 7]))
    assert space.huffman(np.array([1, 1, 2])) == 1.5 == space.entropy(np.array([2, 1, 1]))
    assert space.huffman(np.array([1, 18, 1])) == 1.1
    assert space.huffman(np.array([0, 5])) == 1 and space.entropy(np.array([0, 5])) == 0
    counts = np.array([1, 2, 0, 8, 1, 4])
    assert space.ranked(counts, 2, 4) == 2 + 4 * 2 / 16
    assert space.ranked(counts, 1, 1, 1) == 1 + 8 / 16 + 4 / 16 + 48 * 2 / 16
    assert space.ranked(counts, 2, 1) == 2 + 1 * 2 / 16 + 48 * 1 / 16


def test_exponents_are_counted():
    words = np.concatenate([narrow(3_000), np.arange(0, 2**16, 77).astype(np.uint16)])
    found = Counter(int(word) >> 7 & 0xFF for word in words)
    assert space.exponents(tensor_of(words)).tolist() == [found[exponent] for exponent in range(256)]


def test_the_design_that_was_chosen_is_near_its_bound():
    found = space.designs(normal(2**20)).set_index("design")
    bits, bound = found.bits_per_weight, found.bound
    run = bits["3-bit runs, 4-bit escapes"]
    assert bits["3-bit ranks, 4-bit escapes"] <= run <= bits["3-bit ranks, 4-bit escapes"] + 0.05
    assert run == min(bits[f"{width}-bit runs, 4-bit escapes"] for width in BITS)
    assert bits["entropy"] == bits.min() and bits["Huffman"] == bits.drop("entropy").min()
    assert not bound[[f"{width}-bit runs, 4-bit escapes" for width in BITS]].any() and bound["Huffman"]
    assert bits["zstd"] < 16.1 and bits["lz4, bytes split"] < 16.1


def test_repeated_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="2 names, 1 of them different"):
        Store.build(tmp_path, "abc", ["a", "a"], never)


def resealed(record, **changed):
    """A record with other words in its header, and right checksums."""
    data = record.data.clone()
    words = data[:HEADER].numpy().view(np.int32)
    for name, value in changed.items():
        words[SHAPE if name == "shape" else WORDS.index(name)] = value
    words[WORDS.index("header_sum")] = header_sum(words)
    return WireRecord(data)


@pytest.mark.parametrize("changed", [
    {"base": 300}, {"low": -40}, {"zero": 7}, {"patch_count": -1}, {"bits": 0}, {"bits": 7}, {"dims": 200}, {"dims": -1},
    {"dtype": 9}, {"dtype": 2}, {"shape": 7}, {"count": 5}, {"starts": 0}, {"body": 16}, {"escapes": 512}, {"patches": 0},
    {"escape_count": 1}])
def test_impossible_headers_are_refused(changed):
    record = wire.encode(torch.randn(50_000).bfloat16() * 0.02)
    assert same(wire.decode(resealed(record)), wire.decode(record))
    with pytest.raises(ValueError, match="no record that `encode` writes"):
        wire.decode(resealed(record, **changed))


def test_devices_that_cannot_hold_the_tensor_are_refused():
    record = wire.encode(torch.zeros(5_000).bfloat16())
    with pytest.raises(ValueError, match="device is meta; needed"):
        wire.decode(record, "meta")
    for tensor in (torch.zeros(4, device="meta"), torch.zeros(3, 3).to_sparse()):
        with pytest.raises(ValueError, match="needed: a dense tensor with values"):
            wire.encode(tensor)


@pytest.mark.parametrize("data", [torch.zeros(5_000), torch.full((5_000,), -1, dtype=torch.int8),
                                  torch.zeros(9_000, dtype=torch.uint8)[::2], torch.zeros(3, 900, dtype=torch.uint8)])
def test_what_is_not_a_row_of_bytes_is_refused(data):
    with pytest.raises(ValueError, match="needed: contiguous uint8 of one dimension"):
        wire.decode(data)
