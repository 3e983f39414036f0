import copy
import shutil

import pytest
import torch
import yaml
from conftest import FAMILIES  # the fixtures' own table
from dualdeadline import manifest, models, paths
from transformers import AutoModelForCausalLM, LlamaConfig


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_described(family, tiny_model):
    spec = models.describe(tiny_model(family)[0])
    dense = {"qwen3_moe": 1, "deepseek_v2": 1, "deepseek_v3": 1}.get(family, 0)  # their first layer has no experts
    assert (spec.L, spec.E, spec.K, spec.H, spec.F) == (3 - dense, 8, 2, 32, 16)
    assert [layer.name.rsplit(".", 1)[1] for layer in spec.layers] == [str(i) for i in range(dense, 3)]
    assert spec.kind == ("sigmoid" if family == "deepseek_v3" else "softmax")


@pytest.mark.parametrize("family", FAMILIES)
def test_norm_factor_is_what_the_norm_multiplies_by(family, tiny_model):
    model = copy.deepcopy(tiny_model(family)[0])
    spec = models.describe(model)
    with torch.no_grad():
        for place, layer in enumerate(spec.layers):
            layer.norm.weight.uniform_(0.5, 1.5)
            state = torch.randn(5, spec.H)
            plain = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + models.routers(spec).eps)
            torch.testing.assert_close(layer.norm(state), plain * models.routers(spec).norm[place])


def test_norm_of_an_unknown_kind_is_refused(tiny_model, monkeypatch):
    spec = models.describe(tiny_model("olmoe")[0])
    monkeypatch.setattr(type(spec.layers[0].norm), "forward", lambda self, x: 3 * self.weight * x)
    with pytest.raises(ValueError, match="OlmoeRMSNorm scales neither by its weight nor by one plus it"):
        models.routers(spec)


def test_routers_keep_parameters_the_family_has(tiny_model):
    has = {family: models.routers(models.describe(tiny_model(family)[0])) for family in FAMILIES}
    assert [family for family in has if has[family].bias is not None] == ["gpt_oss"]
    assert [family for family in has if has[family].correction is not None] == ["deepseek_v3"]
    assert all(value.weight.shape[1:] == (8, 32) for value in has.values())


def test_probabilities():
    values = dict(weight=torch.zeros(1, 4, 3), bias=None, norm=None, correction=None, eps=0.0, norm_topk_prob=False, scaling=1.0)
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    assert models.Routers(kind="softmax", **values).probabilities(logits).sum() == pytest.approx(1)
    assert models.Routers(kind="sigmoid", **values).probabilities(logits)[0, 0] == 0.5


def test_model_without_experts_is_refused(tmp_path, tiny_tokenizer):
    config = LlamaConfig(vocab_size=384, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no MoE layer .*needed: a model of one of olmoe"):
        models.load(str(tmp_path), device="cpu")


def test_unknown_family_is_refused(tiny_model, monkeypatch):
    model, _ = tiny_model("mixtral")
    monkeypatch.delitem(models.FAMILIES, "mixtral")
    with pytest.raises(ValueError, match="model family is 'mixtral'; needed: one of olmoe"):
        models.describe(model)


def test_unknown_key_names_the_known_ones():
    with pytest.raises(ValueError, match="model is 'nonsense'; needed: one of pilot-olmoe, olmoe, qwen"):
        models.load("nonsense")


@pytest.fixture
def listed(tmp_path, monkeypatch, tiny_checkpoint):
    """A models.yaml with one embedded tiny model `tiny`; value: function that changes its entry."""
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_checkpoint("olmoe"), folder)
    monkeypatch.setattr(paths, "MANIFESTS", tmp_path)
    entry = {"path": str(folder), "dtype": "float32", "L": 3, "E": 8, "K": 2, "H": 32, "F": 16}

    def write(**changes):
        (tmp_path / "models.yaml").write_text(yaml.safe_dump({"tiny": entry | changes}))

    write()
    return write


def test_listed_model_loads_with_the_experts_asked_for(listed):
    model, tokenizer = models.load("tiny", device="cpu", experts="batched_mm")
    assert model.config._experts_implementation == "batched_mm" and model.dtype == torch.float32
    assert tokenizer("apples")["input_ids"]


def test_sizes_other_than_listed_are_refused(listed):
    listed(E=64)
    with pytest.raises(ValueError, match="has {'E': 8}; needed: what data_manifests/models.yaml says of tiny"):
        models.load("tiny", device="cpu")


def test_missing_embedded_model_names_its_stage(listed, tmp_path):
    listed(path=str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match="notebook 90_pilot_model makes it"):
        models.load("tiny")


def test_revision_follows_the_weights(listed, tmp_path):
    before = models.revision("tiny")
    assert len(before) == 12 and models.revision("tiny") == before
    with open(tmp_path / "tiny" / "model.safetensors", "ab") as handle:
        handle.write(b" ")
    assert models.revision("tiny") != before


def test_every_listed_model_has_its_facts():
    for key, entry in manifest.read_yaml("models.yaml").items():
        assert {"title", "family", "licence", "dtype", "L", "E", "K", "H", "F"} <= set(entry), key
        assert ("path" in entry) != ("hub" in entry and "revision" in entry), key
        assert entry["family"] in models.FAMILIES
