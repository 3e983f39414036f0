"""Slot tables: the rules against a model written otherwise, the kernels against the rules bit by bit.

The kernels run in Triton's interpreter, in a pytest process of its own (`test_in_the_interpreter`), as in
test_kernels.py; so does the decode whose programs share all blocks.
"""

import random

import numpy as np
import pytest
import torch
from conftest import passes_interpreted
from dualdeadline import cache, kernels, wire
from dualdeadline.cache import live
from dualdeadline.cache import slots as rules
from dualdeadline.cache.slots import Ahead, Found, SlotTables
from dualdeadline.kernels import slots as device
from dualdeadline.kernels import wire as wire_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import interpreted, outside

NAN = float("nan")


@outside
def test_in_the_interpreter():
    assert "skipped" not in passes_interpreted(__file__, "-k", "kernel_")


@outside
def test_kernels_compile_without_a_gpu():
    """The interpreter takes programs that the compiler refuses."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    common = dict(K=8, M=8, E=256, C=192, PAIRS=8, SLOTS=256, RULES=device.RULES)
    admits = common | dict(ROOM=2, L=40, LAYERS=128, LISTED=8)
    types = {"values_ptr": "*fp32", "control_ptr": "*fp32", "threshold": "fp32", "counters_ptr": "*i64",
             "settled_ptr": "*i64"}
    for kernel, constants in ((device.lookup_kernel, common), (device.admit_kernel, admits)):
        plain = {name: types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
        signature = {name: "constexpr" if name in constants else kind for name, kind in plain.items()}
        built = compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
        assert len(built.asm["cubin"]) > 1000


class Bank:
    """One bank as a dictionary of experts; says nothing about how tables store it."""

    def __init__(self, slots):
        self.free, self.home, self.when, self.guesses, self.open = list(range(slots)), {}, {}, set(), set()
        self.events = dict.fromkeys(live.EVENTS, 0)

    def place(self, expert, now, spare):
        """Slot for an expert, of the free ones or from an expert that is not spared; None if there is none."""
        if self.free:
            slot = self.free.pop(0)
        else:
            losers = sorted((self.when[other], slot, other) for other, slot in self.home.items() if other not in spare)
            if not losers:
                return None
            _, slot, loser = losers[0]
            del self.home[loser]
            self.events["wasted"] += loser in self.guesses
            self.events["late"] += loser in self.open
            self.guesses.discard(loser)
            self.open.discard(loser)
        self.home[expert], self.when[expert] = slot, now
        return slot


class Model:
    """The rules in other words: banks by (layer, component), a precision as exact fractions of counted events."""

    def __init__(self, L, E, slots):
        self.E, self.banks = E, {(layer, c): Bank(slots[c]) for layer in range(L) for c in (0, 1)}
        self.now = dict.fromkeys(range(L), 0)

    def lookup(self, layer, rows):
        self.now[layer] += 1
        asked = [expert for row in rows for expert in row if expert in range(self.E)]
        out = []
        for c in (0, 1):
            bank, fetched, seen, hits = self.banks[layer, c], [], set(), set(asked) & set(self.banks[layer, c].home)
            for expert in hits:
                bank.when[expert] = self.now[layer]
            bank.events["hits"] += len(hits)
            bank.events["useful"] += len(hits & bank.guesses)
            bank.events["in_time"] += len(hits & bank.open)
            bank.events["late"] += len(bank.open - hits)
            bank.guesses -= hits
            bank.open = set()
            for expert in asked:
                if expert not in seen | hits:
                    fetched.append((expert, bank.place(expert, self.now[layer], set(asked))))
                seen.add(expert)
            bank.events["misses"] += len(fetched)
            out.append(([[bank.home.get(expert, -1) for expert in row] for row in rows], fetched))
        return out

    def admit(self, layer, rows, chances, threshold, budget):
        pairs = [(expert, chance) for row, line in zip(rows, chances) for expert, chance in zip(row, line)]
        best = {}
        for expert, chance in pairs:
            if expert in range(self.E) and chance >= threshold and chance > best.get(expert, -np.inf):
                best[expert] = chance
        place = {expert: pairs.index((expert, chance)) for expert, chance in best.items()}
        order = sorted(best, key=lambda expert: (-best[expert], place[expert]))
        out = []
        for c in (0, 1):
            bank, taken = self.banks[layer, c], []
            there = set(bank.home)
            for expert in there & set(best):
                bank.when[expert] = self.now[layer]
            for expert in order:
                if expert not in there and len(taken) < budget[c]:
                    slot = bank.place(expert, self.now[layer], set(best))
                    if slot is not None:
                        bank.guesses.add(expert)
                        bank.open.add(expert)
                        taken.append((expert, slot))
            bank.events["fetched_ahead"] += len(taken)
            out.append(taken)
        return out


def fetches(lists, component):
    """(expert, slot) pairs, after a look at what stands beyond them."""
    count = int(lists.count[component])
    source, dest = lists.source[component].tolist(), lists.dest[component].tolist()
    assert set(source[count:]) | set(dest[count:]) <= {-1}
    return list(zip(source[:count], dest[:count]))


def agree(tables, model):
    tables.check()
    for (layer, c), bank in model.banks.items():
        assert {e: int(tables.slot_of[layer, c, e]) for e in tables.present(layer, c)} == bank.home
        slots = list(bank.home.values())
        assert len(bank.free) + len(slots) == tables.slots[c] and not set(bank.free) & set(slots)
        for expert, slot in bank.home.items():
            assert tables.used[layer, c, slot] == bank.when[expert]
            wanted = 0 if expert not in bank.guesses else 1 if expert in bank.open else 2
            assert tables.guessed[layer, c, slot] == wanted
    assert tables.clock.tolist() == [[now, now] for now in model.now.values()]
    for event in live.EVENTS:
        for c, name in enumerate(rules.NAMES):
            wanted = sum(bank.events[event] for (_, own), bank in model.banks.items() if own == c)
            assert tables.counts()[f"{event}_{name}"] == wanted


sizes = st.tuples(st.integers(1, 3), st.integers(1, 12), st.tuples(st.integers(1, 9), st.integers(1, 9)))
tenths = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.75, 1.0, NAN])


@given(sizes, st.data())
@settings(deadline=None, max_examples=50)
def test_the_rules_are_those_of_the_model(size, data):
    L, E, slots = size
    tables, model = SlotTables(L, E, slots), Model(L, E, slots)
    for _ in range(data.draw(st.integers(1, 14))):
        layer, N, K = (data.draw(st.integers(low, high)) for low, high in ((0, L - 1), (1, 3), (1, 4)))
        rows = data.draw(st.lists(st.lists(st.integers(-1, E), min_size=K, max_size=K), min_size=N, max_size=N))
        if data.draw(st.booleans()):
            chances = [[data.draw(tenths) for _ in row] for row in rows]
            budget = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
            found = rules.admit(tables, layer, torch.tensor(rows), torch.tensor(chances), 0.5, budget)
            assert found.source.shape == found.dest.shape == (2, max(budget))
            assert [fetches(found, c) for c in (0, 1)] == model.admit(layer, rows, chances, 0.5, budget)
        elif len({expert for row in rows for expert in row if expert in range(E)}) <= min(slots):
            found = rules.lookup(tables, layer, torch.tensor(rows))
            assert found.source.shape == (2, N * K) and found.slots.shape == (2, N, K)
            wanted = model.lookup(layer, rows)
            assert [(found.slots[c].tolist(), fetches(found, c)) for c in (0, 1)] == wanted
        else:
            before = tables.to("cpu")
            with pytest.raises(ValueError, match=rf"needed: at most {min(slots)}, the slots of a bank"):
                rules.lookup(tables, layer, torch.tensor(rows))
            same(tables, before)
        agree(tables, model)


def same(found, wanted):
    for name in SlotTables.FIELDS:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@given(st.integers(1, 8), st.lists(st.integers(0, 8), min_size=1, max_size=60))
@settings(deadline=None, max_examples=40)
def test_single_accesses_hit_as_often_as_in_the_replay(slots, ids):
    tables = SlotTables(1, 9, (slots, 3))
    for expert in ids:
        rules.lookup(tables, 0, torch.tensor([[expert]]))
    routes = np.array(ids).reshape(-1, 1, 1)
    for name, count in zip(rules.NAMES, tables.slots):
        assert tables.counts()[f"hits_{name}"] == cache.hits(routes, count, "lru", "token").sum()


def filled(experts=(0, 1, 2), slots=(3, 4)):
    tables = SlotTables(2, 6, slots)
    rules.lookup(tables, 1, torch.tensor([list(experts)]))
    return tables


def test_what_is_predicted_is_kept_and_nothing_else_is_given_up_for_it():
    tables = filled()
    rules.lookup(tables, 1, torch.tensor([[2]]))  # 0 and 1 are older
    found = rules.admit(tables, 1, torch.tensor([[0, 3, 4, 5]]), torch.tensor([[0.9, 0.8, 0.7, 0.6]]), 0.5, (3, 1))
    assert fetches(found, 0) == [(3, 1), (4, 2)] and tables.present(1, 0) == {0, 3, 4}  # 5 would push out a prediction
    assert fetches(found, 1) == [(3, 3)] and tables.present(1, 1) == {0, 1, 2, 3}
    assert tables.used[1, 0].tolist() == [2, 2, 2, 0] and tables.clock[1].tolist() == [2, 2]
    assert tables.guessed[1, 0].tolist() == [0, 1, 1, 0]
    rules.lookup(tables, 1, torch.tensor([[3, 1, 2]]))
    counts = tables.counts()
    assert (counts["useful_gate_up"], counts["wasted_gate_up"], counts["fetched_ahead_gate_up"]) == (1, 1, 2)
    assert (counts["useful_down"], counts["wasted_down"], counts["fetched_ahead_down"]) == (1, 0, 1)


def test_surplus_misses_are_no_accesses_where_they_are_allowed():
    tables = filled((0, 1), (2, 3))
    found = rules.lookup(tables, 1, torch.tensor([[5, 1], [4, 5]]), check=False)
    assert found.slots.tolist() == [[[0, 1], [-1, 0]], [[2, 1], [0, 2]]]
    assert (tables.counts()["misses_gate_up"], tables.counts()["misses_down"]) == (3, 4)
    tables.check()


@pytest.mark.parametrize("field, place, value, message", [
    ("slot_of", (1, 0, 5), 1, r"slot_of of layer 1, gate_up, is \[0, 1, 2, -1, -1, 1\]; needed: the inverse"),
    ("slot_of", (1, 1, 0), -1, "slot_of of layer 1, down"),
    ("expert_of", (1, 0, 1), 0, r"slot_of of layer 1, gate_up.*\[0, 0, 2, -2\], each expert once"),
    ("expert_of", (1, 0, 3), -1, r"expert_of of layer 1, gate_up.*needed: -1 to 5, -2 from slot 3 on"),
    ("expert_of", (0, 1, 2), -2, "expert_of of layer 0, down"),
    ("expert_of", (0, 1, 2), 6, "expert_of of layer 0, down"),
    ("used", (1, 1, 0), 2, "used of layer 1, down, .*needed: 0 to the clock, 1"),
    ("guessed", (1, 1, 3), 1, "guessed of layer 1, down, .*where an expert lies"),
    ("guessed", (1, 0, 0), 3, "guessed of layer 1, gate_up, .*needed: 0, or 1 or 2 where an expert lies"),
])
def test_tables_that_contradict_themselves_are_named(field, place, value, message):
    tables = filled()
    tables.check()
    getattr(tables, field)[place] = value
    with pytest.raises(ValueError, match=message):
        tables.check()


def test_tables_are_copied_cleared_and_taken_back():
    tables = filled()
    other = tables.to("cpu")
    rules.admit(other, 1, torch.tensor([[3]]), torch.tensor([[1.0]]), 0.5, (1, 0))
    assert tables.present(1, 0) == {0, 1, 2} and other.present(1, 0) == {1, 2, 3}
    assert tables.copy_(other) is tables
    same(tables, other)
    other.withdraw(1, 0, 3)
    assert other.present(1, 0) == {1, 2} and other.counts()["fetched_ahead_gate_up"] == 0
    other.check()
    for expert in (1, 5):
        with pytest.raises(ValueError, match=f"expert {expert} of layer 1 .*needed: a guess"):
            other.withdraw(1, 0, expert)
    tables.clear()
    tables.check()
    assert not tables.present(1, 0) | tables.present(1, 1) and tables.counts()["misses_down"] == 3
    with pytest.raises(ValueError, match=r"are 2, 6, \(3, 4\); needed: 2, 6, \(4, 4\)"):
        SlotTables(2, 6, (4, 4)).copy_(tables)
    for wrong in ((0, 6, (1, 1)), (2, 0, (1, 1)), (2, 6, (1, 0)), (2, 6, (1,))):
        with pytest.raises(ValueError, match="needed: at least 1 each"):
            SlotTables(*wrong)


def guess(tables, state, expert, budget=(2, 2)):
    found = rules.admit(tables, 0, torch.tensor([[expert, expert + 1]]), torch.tensor([[0.9, 0.8]]), 0.5, budget, state)
    return found.count.tolist()


def asked(tables, state, expert, right):
    """A guess of two experts, and the look-up that it is judged by; what was admitted."""
    counts = guess(tables, state, expert)
    rules.lookup(tables, 0, torch.tensor([[expert, expert + 1] if right else [(expert + 32) % 64]]))
    return counts


def test_wrong_guesses_are_stopped_at_once_and_tried_again_after_pauses_that_grow():
    tables, state = SlotTables(2, 64, (64, 64)), rules.control(0.8)  # of slots enough that nothing is ever evicted
    done, acted = 0, []
    for call in range(3000):
        tables.clear()
        acted.append(asked(tables, state, 2 * call % 64, right=False)[0] > 0)
        done += acted[-1]
    assert acted[:4] == [True, True, True, True] and not any(acted[4:64]), "8 wrong ones of 40"
    starts = [call for call in range(1, 3000) if acted[call] and not acted[call - 1]]
    pauses = [second - first for first, second in zip(starts, starts[1:])]
    assert [round(pause, -1) for pause in pauses] == [130, 260, 510, 1030] and done < 20
    assert not rules.is_on(state) and state[4] == live.LONGEST


def test_right_guesses_go_on_again_and_earn_short_pauses():
    tables, state = SlotTables(1, 64, (64, 64)), rules.control(0.8)
    for call in range(150):
        tables.clear()
        asked(tables, state, 2 * call % 64, right=False)
    assert state[4] == 256 and not rules.is_on(state)
    for call in range(400):
        tables.clear()
        asked(tables, state, 2 * call % 64, right=True)
    assert rules.is_on(state) and state[4] == live.SHORTEST and state[0] == 1 and state[1] == live.WINDOW


def test_a_guess_is_judged_once_by_the_next_look_up_of_its_layer():
    tables, state = SlotTables(2, 64, (8, 8)), rules.control(0.5)
    assert guess(tables, state, 4) == [2, 2]
    rules.lookup(tables, 1, torch.tensor([[4]]))  # another layer says nothing
    rules.lookup(tables, 0, torch.tensor([[4]]))  # 4 in time, 5 late
    rules.lookup(tables, 0, torch.tensor([[5]]))  # used after all: useful, but not in time
    counts = tables.counts()
    found = [counts[f"{event}_gate_up"] for event in ("in_time", "late", "useful", "wasted")]
    assert found == [1, 1, 2, 0] and not tables.guessed.any()
    rules.admit(tables, 0, torch.tensor([[9]]), torch.tensor([[0.0]]), 0.5, (1, 1), state)
    assert state.tolist() == pytest.approx([34 / 36, 36, 0.5, 2, live.SHORTEST, 0])
    assert tables.settled.tolist() == [2, 2]


def test_a_shared_bank_judges_the_guesses_of_the_layer_that_looks_up():
    tables = SlotTables(1, 64, (8, 8))
    guess(tables, None, 40)
    rules.lookup(tables, 0, torch.tensor([[1]]), judged=range(0, 32))
    assert tables.counts()["late_down"] == 0
    rules.lookup(tables, 0, torch.tensor([[40]]), judged=range(32, 64))
    assert tables.counts()["late_down"] == tables.counts()["in_time_down"] == 1


def test_the_precision_forgets_and_survives_counters_set_back():
    tables, state = SlotTables(1, 4, (1, 1)), rules.control(0.0)
    column = rules.COUNTERS.index("late_gate_up")
    wanted = 1.0
    for turn in range(6):
        tables.counters[0, column] += 100
        guess(tables, state, 9)
        weight = (32, 128)[turn > 0]
        wanted = wanted * weight / (weight + 100)
        assert float(state[0]) == pytest.approx(wanted, rel=1e-6) and state[1] == live.WINDOW
    tables.counters.zero_()
    guess(tables, state, 9)
    assert float(state[0]) == pytest.approx(wanted, rel=1e-6)
    tables.counters[0, column] += 128
    guess(tables, state, 9)
    assert float(state[0]) == pytest.approx(wanted / 2, rel=1e-6)
    state[3] = live.CALLS - 1
    guess(tables, state, 9)
    assert state[3] == 0


def wide_ids(draw, N, K, E):
    """Ids as top-k gives them, or as a part of a wider tensor, some repeated or out of range."""
    ids = torch.tensor([[draw.randint(-1, E) for _ in range(K + 1)] for _ in range(N)])
    ids = ids.to(draw.choice([torch.int32, torch.int64]))
    return ids[:, :K] if draw.random() < 0.5 else ids[:, :K].contiguous()


def dirty(lists):
    for name in ("source", "dest", "count", "slots"):
        if hasattr(lists, name):
            getattr(lists, name).fill_(77)
    return lists


def step(draw, host, mine, states, N, K, budget, warps):
    """One look-up or admission by both; everything must be equal."""
    layer, ids = draw.randrange(host.L), wide_ids(draw, N, K, host.E)
    if draw.random() < 0.5:
        wanted = rules.lookup(host, layer, ids, check=False)
        found = device.lookup(mine, layer, ids, dirty(Found(N, K)), warps)
        assert torch.equal(found.slots, wanted.slots)
    else:
        chances = torch.tensor([draw.choice([0.0, -0.0, 0.3, 0.5, 1.0, NAN, draw.random()]) for _ in range(N * K)])
        chances = chances.view(N, K)
        chances = chances.to(draw.choice([torch.float32, torch.bfloat16]))
        least = draw.choice([0.3, 0.0, -1.0])
        wanted = rules.admit(host, layer, ids, chances, least, budget, states[0])
        found = device.admit(mine, layer, ids, chances, dirty(Ahead(budget)), least, budget, states[1], warps)
        assert torch.equal(*states) and found.arrived == 0
    for name in ("source", "dest", "count"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    same(mine, host)


@interpreted
@pytest.mark.parametrize("seed", range(6))
def test_kernel_does_what_the_rules_say(seed):
    draw = random.Random(seed)
    L, E, slots = draw.randint(1, 3), draw.randint(1, 24), (draw.randint(1, 14), draw.randint(1, 14))
    host, mine = SlotTables(L, E, slots), SlotTables(L, E, slots)
    weight, even, calls = draw.choice([0, 3, 32]), draw.choice([0, 0.5, 0.95, 2]), draw.choice([0, 60, 2**20 - 3])
    pause, waiting = draw.choice([2, 64, 4096]), draw.choice([0, 0, 1, 3])
    state = torch.tensor([1.0, weight, even, calls, pause, waiting])
    states = state, state.clone()
    budget = draw.randint(0, 4), draw.randint(0, 4)
    for _ in range(16):
        step(draw, host, mine, states, draw.randint(1, 3), draw.randint(1, 6), budget, draw.choice([None, 1, 4]))
    host.check()
    assert sum(host.counts().values()) > 0


@interpreted
def test_kernel_takes_the_largest_sizes():
    draw = random.Random(0)
    host, states = SlotTables(1, 512, (512, 130)), (rules.control(0.0), rules.control(0.0))
    mine = host.to("cpu")
    for _ in range(14):
        step(draw, host, mine, states, 8, 8, (8, 3), None)
    counts = host.counts()
    assert min(counts[f"{event}_down"] for event in live.EVENTS) > 0


@interpreted
def test_kernel_is_on_and_off_as_the_rules_are():
    host, states = SlotTables(2, 64, (4, 3)), [torch.tensor([1.0, 8.0, 0.5, 44.0, 3.0, 0.0]) for _ in range(2)]
    mine, acted = host.to("cpu"), []
    for call in range(24):
        ids, layer = torch.tensor([[2 * call % 64, (2 * call + 1) % 64]]), call % 2
        chances = torch.tensor([[0.9, 0.9]])
        wanted = rules.admit(host, layer, ids, chances, 0.5, (2, 1), states[0])
        found = device.admit(mine, layer, ids, chances, Ahead((2, 1)), 0.5, (2, 1), states[1])
        assert torch.equal(found.count, wanted.count) and torch.equal(*states)
        acted.append(found.count.tolist() == [2, 1])
        rules.lookup(host, layer, ids + 32)
        device.lookup(mine, layer, ids + 32, Found(1, 2))
        same(mine, host)
    assert acted == [True] * 4 + [False] * 3 + [True] * 3 + [False] * 6 + [True] * 3 + [False] * 5
    assert states[1][3] == 68 and states[1][4] == 24


@interpreted
@pytest.mark.parametrize("chances", [[-0.0, 0.0], [0.0, -0.0], [0.5, 0.5], [-1.0, -1.0], [float("inf")] * 2])
def test_kernel_takes_the_first_of_equal_probabilities(chances):
    tables = SlotTables(1, 9, (4, 4))
    ids, chances, ahead = torch.tensor([[7, 3]]), torch.tensor([chances]), Ahead((1, 2))
    found = device.admit(tables, 0, ids, chances, ahead, -1.0, (1, 2), rules.control(0.0))
    assert [fetches(found, c) for c in (0, 1)] == [[(7, 0)], [(7, 0), (3, 1)]]


@interpreted
def test_kernel_lists_may_be_longer_than_the_budget():
    tables, state = SlotTables(1, 9, (4, 4)), rules.control(0.0)
    ids, chances = torch.tensor([[3, 4]]), torch.tensor([[0.9, 0.8]])
    found = device.admit(tables, 0, ids, chances, Ahead((5, 5)), 0.5, (2, 1), state)
    assert [fetches(found, c) for c in (0, 1)] == [[(3, 0), (4, 1)], [(3, 0)]] and found.source.shape == (2, 5)


@interpreted
def test_kernel_arguments_that_do_not_fit_are_named():
    tables, ids, state = SlotTables(2, 9, (4, 4)), torch.tensor([[1, 2]]), rules.control(0.0)
    chances, found, ahead = torch.rand(1, 2), Found(1, 2), Ahead((2, 2))
    for message, changed in {
        "layer is 2; needed: 0 to 1": (tables, 2, ids, found),
        r"ids are torch.float32 \(1, 2\)": (tables, 0, chances, found),
        r"ids are torch.int64 \(2,\)": (tables, 0, ids[0], found),
        "pairs are 0; needed: 1 to 1024": (tables, 0, ids[:0], found),
        "slots are 1025; needed": (SlotTables(1, 9, (1025, 1)), 0, ids, found),
        r"out.slots is torch.int32 \(2, 1, 2\).*needed: contiguous torch.int32 \(2, 2, 1\)": (tables, 0, ids.T, found),
    }.items():
        with pytest.raises(ValueError, match=message):
            device.lookup(*changed)
    for message, changed in {
        r"budget is \(3, 0\); needed: 0 to 2": (chances, ahead, 0.5, (3, 0), state),
        r"budget is \(-1, 0\)": (chances, ahead, 0.5, (-1, 0), state),
        "probabilities are torch.int64": (ids, ahead, 0.5, (1, 1), state),
        r"probabilities are torch.float32 \(2, 1\)": (chances.T, ahead, 0.5, (1, 1), state),
        r"control is torch.float32 \(3,\)": (chances, ahead, 0.5, (1, 1), state[:3]),
    }.items():
        with pytest.raises(ValueError, match=message):
            device.admit(tables, 0, ids, *changed)
    assert kernels.INTERPRETED and tables.clock.sum() == 0 and state[3] == 0


def records(values, bits):
    """Coded, patched and raw records of `values` weights each, as rows of one tensor, and the weights."""
    torch.manual_seed(0)
    normal = (torch.randn(values) * 0.02).bfloat16()
    odd = normal.roll(1)
    odd[5::997] = NAN
    noise = torch.randint(-(2**15), 2**15, (values,), dtype=torch.int16).view(torch.bfloat16)
    tensors = [normal, odd, noise, normal.flip(0)]
    made = [wire.encode(tensor, bits) for tensor in tensors]
    rows = torch.zeros(len(made), max(record.nbytes for record in made), dtype=torch.uint8)
    for row, record in zip(rows, made):
        row[: record.nbytes] = record.data
    return rows, tensors, [record.raw for record in made]


@interpreted
@pytest.mark.parametrize("bits, programs", [(2, 1), (3, 5)])
def test_kernel_programs_that_share_all_blocks_decode_the_same_bits(bits, programs):
    rows, tensors, raw = records(3 * wire.BLOCK + 8, bits)
    assert raw == [False, False, True, False]
    wanted, slots = (torch.tensor(ids, dtype=torch.int32) for ids in ([3, 9, 0, 2, 1], [0, 1, 4, 3, 5]))
    for count in (2, 5, 99):
        banks = [torch.full((6, len(tensors[0])), 7.0, dtype=torch.bfloat16) for _ in range(2)]
        number = torch.tensor([count], dtype=torch.int32)
        for bank, spread in zip(banks, (False, True)):
            assert wire_kernel.decode(rows, bank, wanted, slots, number, bits, programs, spread=spread) is bank
        one, other = (bank.view(torch.int16) for bank in banks)
        assert torch.equal(one, other)
        for place, (row, slot) in enumerate(zip([3, 9, 0, 2, 1], [0, 1, 4, 3, 5])):
            there = tensors[row] if row < 4 and place < count else torch.full_like(tensors[0], 7.0)
            assert torch.equal(other[slot], there.view(torch.int16)), (count, place)
