"""Routes for larger models: tiled blocks keep what was recorded, drawn locality hits as often as was asked for."""

import numpy as np
import pytest
import torch

from dualdeadline import cache
from dualdeadline.decode import recorded, routes, study


def small(T=10, L=3, E=6, K=2):
    draw = torch.Generator().manual_seed(0)
    chosen = torch.rand(T, L, E, generator=draw).topk(K, -1).indices
    found = recorded.Recorded(chosen, torch.arange(T) // 5, {"random": torch.rand(T, L, E, generator=draw)}, 1)
    return study.with_controls(found, 0)


def test_blocks_are_recorded_steps_of_the_same_prompt_and_nothing_is_guessed_across_their_borders():
    one = small()
    found = routes.tile(one, 7, offset=2)
    assert found.routes.shape == (10, 7, 2) and torch.equal(found.routes[:, :3], one.routes)
    assert torch.equal(found.routes[0, 3:6], one.routes[2]) and torch.equal(found.routes[4, 3:6], one.routes[1])
    assert torch.equal(found.routes[9, 6], one.routes[8, 0])
    assert found.spans == one.spans
    for name, scores in found.scores.items():
        assert (scores[:, [0, 3, 6]] == routes.NEVER).all()
        assert torch.equal(scores[0, 4:6], one.scores[name][2, 1:])
    told = found.scores["oracle"].gather(-1, found.routes)[:, [1, 2, 4, 5]]
    assert (told == 1).all(), "scores moved with their routes"


@pytest.mark.parametrize("hits", [{64: 0.66, 128: 0.86, 192: 0.96}, {16: 0.5}])
def test_an_lru_cache_hits_as_often_as_was_asked_for(hits):
    found = routes.synthetic(2, 256, 8, hits, prompts=3, steps=100, seed=1)
    assert found.routes.shape == (300, 2, 8) and [span.stop - span.start for span in found.spans] == [100] * 3
    assert (found.routes.sort(-1).values.diff(dim=-1) > 0).all(), "distinct within a token"
    for slots, wanted in hits.items():
        got = np.mean(cache.hit_rate(found.routes.numpy(), slots, "lru", "token"))
        filling = slots / (8 * len(found.routes))  # one cold start: misses that fill the slots
        assert wanted - filling - 0.02 < got < wanted + 0.02
    again = routes.synthetic(2, 256, 8, hits, prompts=3, steps=100, seed=1)
    assert torch.equal(again.routes, found.routes)


def test_rates_that_cannot_be_had_are_refused():
    for hits in ({64: 0.9, 128: 0.8}, {64: 1.0}, {4: 0.1}):
        with pytest.raises(ValueError, match="needed: rates that rise, slots at least 8 apart"):
            routes.synthetic(1, 256, 8, hits, 1, 2, 0)


def test_recorded_routes_of_another_model_drive_a_larger_one(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    from dualdeadline import paths
    from dualdeadline.confirmation.place import Place

    monkeypatch.setattr(paths, "DATA", tmp_path)
    told = dict(profile="smoke", model="small", corpus="pilot", split="test", labels=[], horizon=1, prompts=2)
    one, path = small(), Place("smoke", "small").base / recorded.NAME
    path.parent.mkdir(parents=True)
    made_for = {name: value for name, value in told.items() if name != "profile"} | {"labels": "", "seed": 0}
    tensors = {"routes": one.routes.short(), "prompt": one.prompt, "experts": torch.tensor(6)}
    save_file(tensors, path, {name: str(value) for name, value in made_for.items()})
    found = routes.driving(told, {}, 0, L=7, E=6, K=2)
    assert torch.equal(found.routes[:, :3], one.routes) and set(found.scores) == {"random", "oracle", "shuffled"}
    assert (found.scores["random"][:, 3] == routes.NEVER).all() and (found.scores["random"][:, 4] >= 0).all()
    with pytest.raises(ValueError, match="small has E 6, K 2; needed: E 256, K 8"):
        routes.driving(told, {}, 0, L=7, E=256, K=8)
