"""What notebook 09 says, from made-up rows whose values follow from their keys."""

import made_up_records
import pandas as pd
import pytest

from dualdeadline import record
from dualdeadline.report import decode, decode_large, decode_beside


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    with made_up_records.workspace(tmp_path_factory.mktemp("data"), made_up_records.decode) as workspace:
        yield record.read(workspace, decode.STAGE, made_up_records.MODEL)


def test_warm_and_cold_slots_slow_links_and_plain_layers_stay_apart(rows):
    cold, warm = decode.steps(rows), decode.steps(rows, warm=True)
    assert set(cold.slots) == {16, 32, 48, 64} and set(warm.slots) == {16, 32, 48}
    assert not cold.duplicated(["name", "slots"]).any() and not warm.duplicated(["name", "slots"]).any()
    assert decode.resident_ms(rows) == 1.5


def test_floors_add_the_link_to_the_resident_step(rows):
    line = decode.floors(rows).loc[("raw, two deadlines", 32, "cold")]
    link = 5e6 * 32 / 51.0 / 1e6
    assert line["resident + link, ms"] == pytest.approx(1.5 + link)
    assert line["ratio"] == pytest.approx(line["step, ms"] / (1.5 + link))
    assert line["to the longer of both"] == pytest.approx(line["step, ms"] / max(1.5, link))
    assert line["at a fetch's rate"] == pytest.approx(line["step, ms"] / (1.5 + 5e6 * 32 / 40.0 / 1e6))
    coded = decode.floors(rows).loc[("coded, two deadlines", 32, "cold")]
    assert coded["at a fetch's rate"] == pytest.approx(coded["step, ms"] / (1.5 + 5e6 * 32 / 50.0 / 1e6))
    low, high = (f(decode.ratios(rows, "raw", "at a fetch's rate")) for f in (min, max))
    assert decode.reads(rows).startswith(" A kernel that fetches reads 40.0 (raw) and 50.0 GB/s (encoded)")
    assert f"copies move 51.0; at the former rates the ratios are {low:.2f} to {high:.2f} and" in decode.reads(rows)
    assert len(decode.ratios(rows, "raw")) == 6 and len(decode.ratios(rows, "coded")) == 9


def test_the_map_has_a_line_for_each_link_and_kind_of_layer(rows):
    found = decode.spread(rows, 16)
    assert sorted(found.index.get_level_values("layers")) == ["compiled"] * 3 + ["plain"]
    assert (found["coded: guesses"] > 0).all() and (found["coded: two deadlines"] == 0).all()
    gbps = found.index.get_level_values("GB/s")
    assert gbps[0] == pytest.approx(5e6 * 32 / (5.5 - 1.5) / 1e6)
    assert found["raw: gate/up in windows"].iloc[0] == pytest.approx(8e6 / gbps[0] / 1e6 / (1.5 / 16))


def test_simulated_steps_are_compared_with_measured_ones_of_the_same_case(rows):
    found = decode.errors(rows)
    assert len(found) == 12
    assert found["off by, %"].iloc[0] == pytest.approx(100 * (5.0 / found["measured"].iloc[0] - 1))


def test_without_measured_rows_the_answer_says_what_is_needed(rows):
    assert "needed: this notebook run on a GPU" in decode.answer(rows[rows.metric == "nothing"])
    assert "of 64 slots" in decode.answer(rows)


def test_the_larger_sizes_are_told_with_what_drove_them(rows):
    assert "not been measured yet" in decode_large.answer(rows[rows.metric == "nothing"])
    for name, said in (("synthetic", "routes synthetic"), ("pilot-qwen", "routes of pilot-qwen, tiled over the layers")):
        text = decode_large.answer(rows.assign(**{"config.routes": name}))
        assert said in text and "at 32 (hit rate 0.50)" in text
        assert "slots that stay warm" in text


def test_guesses_at_the_larger_sizes_are_told_by_slots_and_only_where_measured(rows):
    told = rows.assign(**{"config.routes": "synthetic"})
    text = decode_large.answer(told)
    cold, warm = text[text.index(" Tokens/s with guesses: ") :].split(" Tokens/s with guesses in warm slots: ")
    assert "the predictor's 132 at 16, 179 at 32, 278 at 48; the next router's 132 at 16" in cold and "perfect 132" in cold
    assert "A step with wrong guesses takes 0.900 times as long" in cold
    assert warm.startswith("the predictor's 156 at 16, 208 at 32, 312 at 48.") and "wrong" not in warm
    plain = told[~told.metric.str.startswith("prefetch")]
    assert "guesses" not in decode_large.answer(plain)
    free = told[~told.variant.str.startswith("residual_gate")]
    assert "guesses: the next router's" in decode_large.answer(free)
    mixed = told.assign(**{"config.routes": told["config.warm"].map({True: "pilot-qwen"}).fillna("synthetic")})
    assert "routes of pilot-qwen, tiled over the layers and synthetic:" in decode_large.answer(mixed)


def test_what_a_run_did_not_measure_is_left_out(rows):
    part = rows[rows.metric != "single_ms"]
    assert decode.reads(part) == "" and decode.floors(part)["at a fetch's rate"].isna().all()
    assert "fetch" not in decode.answer(part) and "(51.0 GB/s). Two deadlines" in decode.answer(part)


def test_tokens_per_second_with_guesses_are_those_of_the_setting_told(rows):
    other = rows[(rows.variant == "residual_gate") & (rows.metric == "tokens_per_s")]
    other = other.assign(**{"config.budget": "1-0", "median": 9999.0})
    both = pd.concat([rows, other], ignore_index=True)
    assert decode.best(both, 16, "residual_gate") == decode.best(rows, 16, "residual_gate") < 9999


def test_steps_of_a_run_of_their_own_are_not_set_against_another_runs_floor(rows):
    part = rows.assign(**{"scope.part": rows["config.warm"].map({True: "warm"}).fillna("steps")})
    assert set(decode.floors(part).index.get_level_values("caches")) == {"cold"}


def test_memory_under_a_limit_stands_beside_it(rows):
    assert decode_beside.memory(rows).empty
    one = rows.iloc[:1].assign(metric="reserved_bytes", variant="within 6GiB", median=5 * 2**30)
    found = decode_beside.memory(one.assign(**{"config.limit_bytes": 6 * 2**30, "config.slots": 20}))
    assert found.loc["within 6GiB"].tolist() == [6.0, 5.0, 20]
