"""Which recorded steps are simulated, and for how many each stands."""

import numpy as np

from dualdeadline.decode import simulated


def test_every_recorded_step_counts_once_and_the_first_ones_stand_for_themselves():
    prompt = np.repeat([0, 1, 2], [30, 5, 17])
    weights = simulated.picked(prompt)
    per_prompt = [sum(count for row, count in weights.items() if prompt[row] == number) for number in range(3)]
    assert per_prompt == [30, 5, 17]
    assert all(weights[row] == 1 for row in [*range(8), *range(30, 35), *range(35, 43)])
    assert len(weights) == (8 + 3) + 5 + (8 + 2)


def test_a_mean_over_the_picked_steps_is_that_of_all_where_steps_change_slowly():
    prompt = np.zeros(96, int)
    cost = 1 + 20 * np.exp(-np.arange(96) / 3)  # empty slots cost most at the start
    weights = simulated.picked(prompt)
    mean = sum(cost[row] * count for row, count in weights.items()) / 96
    assert abs(mean / cost.mean() - 1) < 0.02
