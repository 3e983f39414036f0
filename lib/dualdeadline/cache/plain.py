"""The loop that everyone writes first, kept to test and time the one-pass replay against."""

from __future__ import annotations

from collections import OrderedDict


def ordered_dict_lru(routes, slots, prompt=None) -> float:
    """Hit rate of LRU, order "rank", all layers together: the loop that everyone writes first."""
    hits = 0
    prompt = [0] * len(routes) if prompt is None else list(prompt)
    for layer in range(routes.shape[1]):
        cache, current = OrderedDict(), None
        for ids, own in zip(routes[:, layer].tolist(), prompt):
            if own != current:
                cache.clear()
                current = own
            for expert in ids:
                if expert in cache:
                    cache.move_to_end(expert)
                    hits += 1
                else:
                    if len(cache) >= slots:
                        cache.popitem(last=False)
                    cache[expert] = None
    return hits / routes.size
