"""Shared fixtures: a tiny tokenizer and tiny random checkpoints of every MoE family, in the real format."""

from __future__ import annotations

import os
import subprocess
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402

from dualdeadline import tiny  # noqa: E402


def interpreted_python(*arguments: str, **more) -> subprocess.CompletedProcess:
    """Run Python with Triton's interpreter, which has to be chosen before Triton is imported."""
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | more.pop("env", {})
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, **more)


def passes_interpreted(file: str, *options: str) -> str:
    """Run a test file in a pytest process of its own, in Triton's interpreter; what it printed, once all passed."""
    done = interpreted_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *options, file)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: benchmarks and long matrices; `make test MARK=` runs them too")


LONG = (  # left out of `make test`, which CI gives a quarter of an hour on two cores; `make test MARK=slow` runs them
    "test_attribution.py",
    "test_broken.py",
    "test_confirmation.py",
    "test_decode_large.py::test_in_the_interpreter",
    "test_engine_use.py::test_a_shared_pool",
    "test_families.py",
    "test_loading.py",
    "test_next_token.py",
    "test_pretrain_qwen.py",
    "test_pretrain_train.py::test_sparse_experts_equal_dense",
    "test_remote.py",
    "test_scale.py",
    "test_smoke.py::test_published_outputs_come_out_again",
    "test_store.py",
    "test_tiers.py",
    "test_traces.py::test_capture_costs",
    "test_traces.py::test_command",
    "test_traces.py::test_damaged_part",
    "test_traces.py::test_killed_process_goes_on_also",
    "test_traces.py::test_parts_are_joined",
)
KEPT = (  # of those, what CI still runs
    "attribution.py::test_a_late_guess",
    "attribution.py::test_a_decode_is",
    "come_out_again[00_map]",
    "come_out_again[01_corpus]",
    "come_out_again[09_decode]",
    "come_out_again[12_paper]",
    "checks_pass[OLMoE]",
    "confirmation.py::test_a_run_as_fixed",
    "confirmation.py::test_a_whole_store",
    "confirmation.py::test_ahead_is",
    "confirmation.py::test_beside_has",
    "confirmation.py::test_every_changed",
    "confirmation.py::test_the_best_candidate",
    "confirmation.py::test_the_shared_expert",
    "checks_pass[Qwen3.5-MoE, text]",
    "from_pretrained_and_offload_give",
    "guesses for both]",
    "logits_and_gradients_equal_transformers[32]",
    "remote.py::test_bits_are_those_of_the_resident_run[olmoe-torch.float32]",
    "shared_pool_gives_the_same_bits[2]",
    "store.py::test_a_guess_that_is_still_being_read",
    "store.py::test_a_storage_begins",
    "store.py::test_records_are_aligned",
    "uneven blocks]",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if any(name in item.nodeid for name in LONG) and not any(name in item.nodeid for name in KEPT):
            item.add_marker(pytest.mark.slow)


FAMILIES = {name: entry for name, entry in tiny.TINY.items() if name != "granitemoeshared"}  # like granitemoe
tiny_config = tiny.config


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """`tiny.tokenizer`, trained once."""
    return tiny.tokenizer()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory, tiny_tokenizer):
    """`tiny_checkpoint(family, **config changes)` -> folder of a random checkpoint with its tokenizer."""
    made = {}

    def make(family: str, **changes):
        key = (family, *sorted(changes.items()))
        if key not in made:
            model = tiny.model(family, **changes)
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            tiny_tokenizer.save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint):
    """`tiny_model(family)` -> (model, tokenizer) of a tiny checkpoint, loaded by `models.load` in float32."""
    from dualdeadline import models

    loaded = {}

    def load(family: str = "olmoe"):
        if family not in loaded:
            loaded[family] = models.load(str(tiny_checkpoint(family)), device="cpu")
        return loaded[family]

    return load


@pytest.fixture(scope="session")
def tiny_prompts():
    """Nine prompts of two sources and unequal lengths: 5 train, 2 validation, 2 test."""
    from dualdeadline.corpus import Prompt

    texts = ["how many apples", "a list of words and numbers, a few left", "numbers", "are apples words?",
             "a few", "left, left, left and left again, how many?", "lists about lists", "many words", "apples"]
    splits = ["train"] * 5 + ["validation"] * 2 + ["test"] * 2
    return [Prompt(f"p{i}", ("words", "code")[i % 2], split, f"g{i}", text)
            for i, (split, text) in enumerate(zip(splits, texts, strict=True))]


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory, tiny_model, tiny_prompts):
    """Traces of a tiny OLMoE, sampled, 12 new tokens."""
    from dualdeadline import traces

    model, tokenizer = tiny_model("olmoe")
    out = tmp_path_factory.mktemp("traces") / "tiny"
    return traces.collect(model, tokenizer, tiny_prompts, out, new_tokens=12, batch_size=4, sampling=traces.Sampling())
