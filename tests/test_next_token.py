"""Guesses for the next token of the same layer: their counts, and that they change time only."""

import pytest
import torch
from factory import synthetic_trace
from test_engine import build

from dualdeadline import engine
from dualdeadline.engine.next_token import PRIOR, NextToken, SameAgain


@pytest.fixture
def olmoe():
    model = build()
    yield model
    if hasattr(model, "dualdeadline"):
        model.dualdeadline.remove()


def generated(model, new=16):
    ids = torch.randint(1, 380, (1, 5), generator=torch.Generator().manual_seed(0))
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)


def test_counts_are_those_of_the_trace():
    trace = synthetic_trace(prompts=3, tokens=7)
    found, E = NextToken.fit(trace), trace.num_experts
    routes, layer = trace.routes.long(), 1
    joint, single, popular, pairs = torch.zeros(E, E), torch.zeros(E), torch.zeros(E), 0
    for row in range(1, len(routes)):
        if trace.prompt[row] == trace.prompt[row - 1]:
            pairs += 1
            for i in routes[row - 1, layer].tolist():
                single[i] += 1
                for j in routes[row, layer].tolist():
                    joint[i, j] += 1
            popular[routes[row, layer]] += 1
    assert pairs == 3 * 6
    wanted = (joint + PRIOR * popular / pairs) / (single[:, None] + PRIOR)
    assert torch.allclose(found.table[layer], wanted) and found.table.shape == (routes.shape[1], E, E)
    guess = found(layer, None, routes[:2, layer])
    assert torch.allclose(guess[0], wanted[routes[0, layer]].mean(0)) and guess.max() <= 1
    with pytest.raises(ValueError, match="two tokens"):
        NextToken.fit(synthetic_trace(prompts=2, tokens=1))


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["demand_pipelined", "staged_pipelined"])
def test_guesses_across_tokens_leave_the_bits_alone(olmoe, slots, schedule):
    wanted, L, E = generated(olmoe), 3, 8
    even = NextToken(torch.rand(L, E, E, generator=torch.Generator().manual_seed(1)))
    for predictor in (even, SameAgain(E)):
        engine.offload(olmoe, slots=slots, backend="cpu", predictor=predictor, threshold=0.3, budget=(2, 1), schedule=schedule)
        assert torch.equal(generated(olmoe), wanted)
        counts = olmoe.dualdeadline.stats()
        assert "failed" not in counts["prefetch_reason"] and (predictor is not even or counts["bytes_ahead"] > 0)
        olmoe.dualdeadline.pool.tables.check()
        olmoe.dualdeadline.remove()


def test_what_is_guessed_right_is_there_at_the_next_token(olmoe):
    """The same token again and again, guesses that know its routes, and slots that are emptied in between."""
    routed = {}

    class Knows(SameAgain):
        def __call__(self, number, hidden, ids):
            routed[number] = ids.clone()
            return super().__call__(number, hidden, ids)

    engine.offload(olmoe, slots=4, backend="cpu", predictor=Knows(8), budget=(4, 4))
    handle = olmoe.dualdeadline
    speculate = handle.hosted._speculate

    def forgetful(number, *args):
        for component in range(2):
            for expert in handle.pool.present(number, component):
                tables = handle.pool.tables
                slot = int(tables.slot_of[number, component, expert])
                tables.slot_of[number, component, expert], tables.expert_of[number, component, slot] = -1, -1
        speculate(number, *args)

    handle.hosted._speculate = forgetful
    with torch.no_grad():
        first = olmoe(torch.tensor([[7]])).logits
        before = handle.stats()["misses"]
        assert torch.equal(olmoe(torch.tensor([[7]])).logits, first)
    counts = handle.stats()
    assert counts["misses"] == before and counts["bytes_useful"] > 0 and len(routed) == 3  # the last layer too
