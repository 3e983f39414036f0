import copy
import errno
import http.server
import json
import shutil
import threading
import urllib.parse
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from conftest import FAMILIES  # the fixtures' own table
from dualdeadline import checkpoints, manifest, models, paths, tiny, traces
from safetensors.torch import load_file, save_file
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
    with pytest.raises(ValueError, match="LlamaForCausalLM has no MoE layer.*needed: a model of one of olmoe"):
        models.load(str(tmp_path), device="cpu")


def test_unknown_family_is_refused(tiny_model, monkeypatch):
    model, _ = tiny_model("mixtral")
    monkeypatch.delitem(models.FAMILIES, "mixtral")
    with pytest.raises(ValueError, match="of the family 'mixtral', which is not supported.*Supported: olmoe"):
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


def test_a_missing_embedded_model_is_said_to_be_part_of_the_repository(listed, tmp_path):
    listed(path=str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match="gone is missing; needed: the embedded model, which is part of the repository"):
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


# published formats: shards with an index, chat template, processor files; from a hub, interrupted, and from a folder

COMMIT = "0123456789abcdef" * 2 + "01234567"
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
SIZES = {"L": 3, "E": 8, "K": 2, "H": 32, "F": 16, "dtype": "bfloat16"}
PUBLISHED = {"olmoe": "allenai/OLMoE-1B-7B-0924-Instruct", "qwen": "Qwen/Qwen3.6-35B-A3B"}


def save_published(key, folder, tokenizer):
    """A tiny checkpoint in the published layout: OLMoE's experts one by one and its template in the tokenizer's config;
    Qwen's multimodal wrapper with fused experts, an unused multi-token head, a template and processor files of their own."""
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = TEMPLATE
    if key == "olmoe":
        model = tiny.model("olmoe").bfloat16()
        model.save_pretrained(folder, max_shard_size="40KB")
        chat.save_pretrained(folder, save_jinja_files=False)
        return model
    model = tiny.model("qwen3_5_moe", tiny.MULTIMODAL).bfloat16()
    model.config.text_config.dtype = torch.bfloat16  # the published config says it there
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    chat.save_pretrained(folder)
    held = {name: value.contiguous() for name, value in model.state_dict().items()} | {"mtp.fc.weight": torch.ones(32, 64)}
    files = [f"model.safetensors-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    where = {name: files[i % 3] for i, name in enumerate(sorted(held))}
    for file in files:
        save_file({name: held[name] for name in held if where[name] == file}, folder / file, metadata={"format": "pt"})
    total = sum(value.nbytes for value in held.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "preprocessor_config.json").write_text(json.dumps(
        {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor", "patch_size": 4}))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": "Qwen3VLVideoProcessor"}))
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory, tiny_tokenizer):
    """`published(key)` -> (folder in the published layout, the model it was saved from)."""
    made = {}

    def make(key):
        if key not in made:
            folder = tmp_path_factory.mktemp(key)
            made[key] = folder, save_published(key, folder, tiny_tokenizer)
        return made[key]

    return make


class Hub(http.server.ThreadingHTTPServer):
    """A hub on this machine. `folders` by repository; `refuses`: repository -> (status, error code); `cut`: file ->
    bytes after which its transfers break, one after another; `asked`: (file, first byte) of every transfer."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.folders, self.refuses, self.cut, self.asked = {}, {}, {}, []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urllib.parse.unquote(self.path.split("?")[0])
        repo = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
        status, code = self.server.refuses.get(repo, (404, "RepoNotFound") if repo not in self.server.folders else (200, ""))
        if status == 200 and COMMIT not in path:
            status, code = 404, "RevisionNotFound"
        if status != 200:
            return self.send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})
        folder = self.server.folders[repo]
        if "/tree/" in path:
            rows = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": manifest.file_sha256(file)[:40]}
                    for file in sorted(folder.iterdir())]
            return self.send(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})
        file = folder / path.rsplit("/", 1)[1]
        if not file.exists():
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        content, start = file.read_bytes(), 0
        if given := self.headers.get("Range"):
            start = int(given.removeprefix("bytes=").split("-")[0])
        if self.command == "GET":
            self.server.asked.append((file.name, start))
        cuts = self.server.cut.get(file.name) if self.command == "GET" else None
        stop = cuts.pop(0) if cuts else None
        more = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if given else {}
        more |= {"ETag": f'"{manifest.file_sha256(file)[:40]}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        return self.send(206 if given else 200, content[start:], more, stop)

    def send(self, status, content, headers, stop=None):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:stop])
        self.close_connection = True


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A running `Hub` that huggingface_hub takes for the real one, and an empty cache."""
    from huggingface_hub import constants, file_download

    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(file_download.time, "sleep", lambda *_: None)
    monkeypatch.setattr(paths, "DATA", tmp_path / "data")
    monkeypatch.setattr(paths, "DOWNLOADS", tmp_path / "data" / "downloads")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def profile(tmp_path, monkeypatch, hub):
    """models.yaml with the profiles' keys, their repositories and the sizes of the tiny checkpoints."""
    listed = {key: SIZES | {"hub": name, "revision": COMMIT, "family": "olmoe"} for key, name in PUBLISHED.items()}
    monkeypatch.setattr(paths, "MANIFESTS", tmp_path)
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(listed))
    return listed


def cache():
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def check_loaded(model, tokenizer, saved):
    """Every weight of the text model, in the dtype listed, and the template; the vision tower is left out."""
    wanted, found = saved.state_dict(), model.state_dict()
    for name, value in found.items():
        home = name if name in wanted else name.replace("model.", "model.language_model.", 1)
        assert torch.equal(value, wanted[home]), name
    assert not any("visual" in name or "mtp" in name for name in found) and model.dtype == torch.bfloat16
    assert tokenizer.decode(models.encode(tokenizer, "how many")) == "<user>how many<a>"


@pytest.mark.parametrize("key", PUBLISHED)
def test_listed_checkpoint_from_the_hub_and_then_without_it(key, published, hub, profile, tiny_prompts, tmp_path):
    folder, saved = published(key)
    hub.folders[PUBLISHED[key]] = folder
    assert models.tokenizer(key).chat_template and not any(name.endswith(".safetensors") for name, _ in hub.asked)
    model, tokenizer = models.load(key, device="cpu")
    check_loaded(model, tokenizer, saved)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    assert all(count == 1 for count in Counter(hub.asked).values())  # nothing is fetched twice
    hub.shutdown()  # from here on the cache has to do
    model, tokenizer = models.load(key, device="cpu")
    check_loaded(model, tokenizer, saved)
    found = traces.collect(model, tokenizer, tiny_prompts[:2], tmp_path / "traces", 3, 2)
    assert found.meta["revision"] == models.revision(key) == COMMIT and found.meta["name"] == PUBLISHED[key]
    assert found.meta["family"] == {"olmoe": "olmoe", "qwen": "qwen3_5_moe_text"}[key] and len(found.split()) > 0


@pytest.mark.parametrize("key", PUBLISHED)
def test_local_folder_stands_in_for_the_hub(key, published, hub, profile, tmp_path):
    """By its path, or linked under the key; the hub, which has nothing, is never asked."""
    folder, saved = published(key)
    check_loaded(*models.load(str(folder), device="cpu"), saved)
    home = paths.DOWNLOADS / checkpoints.LOCAL
    home.mkdir(parents=True)
    (home / key).symlink_to(folder)
    check_loaded(*models.load(key, device="cpu"), saved)
    assert models.revision(key) == models.revision(str(folder)) and len(models.revision(key)) == 12 and hub.asked == []


def test_broken_download_goes_on_where_it_was(published, hub, profile):
    """A connection that breaks goes on at its byte, a command that fails or is stopped at its file."""
    folder, saved = published("olmoe")
    hub.folders[PUBLISHED["olmoe"]] = folder
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    hub.cut = {shards[0]: [3000], shards[1]: [3000] + [0] * 20}
    with pytest.raises(OSError, match=r"OLMoE.* is not whole in the cache and the hub cannot be reached .*the same command goes on"):
        models.load("olmoe", device="cpu")
    starts = [start for name, start in hub.asked if name == shards[0]]
    assert len(starts) == 2 and starts[0] == 0 < starts[1] <= 3000
    done = {path.name for path in Path(cache()).rglob("*.safetensors")}
    assert shards[0] in done and shards[1] not in done
    hub.cut.clear()
    before = len(hub.asked)
    check_loaded(*models.load("olmoe", device="cpu"), saved)
    assert {name for name, _ in hub.asked[before:] if name.endswith(".safetensors")} == set(shards) - done


def test_disk_that_is_too_full_is_told_before_anything_is_fetched(published, hub, profile, monkeypatch, capsys):
    folder, _ = published("olmoe")
    hub.folders[PUBLISHED["olmoe"]] = folder
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1000))
    monkeypatch.setattr(checkpoints, "TOLD_BYTES", 1000)
    with pytest.raises(OSError, match="needs 0.00 GiB of disk, 0.00 GiB are free; needed: room there, or HF_HOME") as told:
        models.load("olmoe", device="cpu")
    assert told.value.errno == errno.ENOSPC and hub.asked == []
    assert "0.0 GiB in" in capsys.readouterr().out


@pytest.mark.parametrize("refused, words", [
    ((403, "GatedRepo"), "is gated: its owners ask .*accept its terms at .*OLMoE.*hf auth login, or HF_TOKEN.*or a local folder"),
    ((404, "RepoNotFound"), "the hub has no allenai/OLMoE.*or it is private. Needed: another name.*or a local folder"),
    ((404, "RevisionNotFound"), f"OLMoE.* has no revision '{COMMIT}'; needed: one that the hub lists"),
])
def test_repository_that_cannot_be_had_is_explained(refused, words, hub, profile):
    hub.refuses[PUBLISHED["olmoe"]] = refused
    for ask in (models.load, models.tokenizer):
        with pytest.raises(OSError, match=words):
            ask("olmoe")


def test_no_network_is_explained(hub, profile, monkeypatch):
    from huggingface_hub import constants

    words = r"is not whole in the cache and the hub cannot be reached .*Needed: a network .*linked as .*downloads/models/<key>"
    hub.shutdown()
    hub.server_close()
    with pytest.raises(OSError, match=words):
        models.load("olmoe")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=words):
        models.load("olmoe")


def test_weights_that_do_not_fit_are_refused_before_they_are_read(published, monkeypatch, capsys):
    folder, saved = published("olmoe")
    size = sum(value.nbytes for value in saved.state_dict().values())
    assert checkpoints.weight_bytes(folder, torch.bfloat16) == size
    assert checkpoints.weight_bytes(folder, torch.float32) == 2 * size
    monkeypatch.setattr(checkpoints, "_free", lambda device: size - 1)
    monkeypatch.setattr(models, "_from_files", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match=r"has weights of 0.00 GiB and cpu has .*needed: more memory on cpu, several GPUs"):
        models.load(str(folder), device="cpu")
    monkeypatch.setattr(checkpoints, "TOLD_BYTES", 1)
    monkeypatch.setattr(checkpoints, "_free", lambda device: {"cpu": 5, "cuda:1": 2**40}[device])
    with pytest.raises(ValueError, match="more memory on cpu"):  # it passes through host memory
        checkpoints.memory("some/model", 6, "cuda:1")
    checkpoints.memory("some/model", 5, "cuda:1")
    assert "some/model: weights of 0.0 GiB, cuda:1 has 1024.0 GiB free, cpu has 0.0 GiB free" in capsys.readouterr().out


def test_this_machine_has_memory():
    assert 2**20 < checkpoints._free("cpu") < 2**50
    assert torch.cuda.is_available() or checkpoints._free("auto") == pytest.approx(checkpoints._free("cpu"), rel=0.2)


def test_damaged_checkpoint_is_named(published, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(published("qwen")[0], folder)
    index, shard = folder / checkpoints.INDEX, sorted(folder.glob("*.safetensors"))[1]
    content, listed = shard.read_bytes(), index.read_text()

    def refused(words):
        with pytest.raises(ValueError, match=words):
            models.load(str(folder), device="cpu")

    shard.write_bytes(content[:-1])
    refused(f"{shard.name} has {len(content) - 1} bytes, its header says {len(content)}; needed: download or copy it again")
    shard.write_bytes(b"<html>")
    refused(f"{shard.name} is no safetensors file")
    shard.unlink()
    refused(rf"lacks 1 of 3 files that {checkpoints.INDEX} names: {shard.name}")
    shard.write_bytes(content)
    index.write_text("{}")
    refused("index.json is damaged")
    index.write_text(listed)
    kept = load_file(shard)
    kept.pop(next(name for name in kept if "language_model" in name))
    save_file(kept, shard, metadata={"format": "pt"})
    refused("lacks 1 weights of Qwen3_5MoeForCausalLM: model.*; needed: a whole checkpoint of that model")
    (folder / "config.json").write_text("{")
    refused("config.json cannot be read")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ValueError, match="holds no .*safetensors; needed"):
        checkpoints._files(folder)


def test_hashes_of_large_files_are_remembered(published, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "DATA", tmp_path / "data")
    folder = tmp_path / "copy"
    shutil.copytree(published("olmoe")[0], folder)
    wanted = checkpoints.digest(folder)
    assert not (tmp_path / "data").exists()
    monkeypatch.setattr(checkpoints, "TOLD_BYTES", 1)
    assert checkpoints.digest(folder) == wanted
    monkeypatch.setattr(manifest, "file_sha256", lambda path: pytest.fail("hashed again"))
    assert checkpoints.digest(folder) == wanted
    monkeypatch.undo()
    monkeypatch.setattr(paths, "DATA", tmp_path / "data")
    with open(sorted(folder.glob("*.safetensors"))[0], "ab") as handle:
        handle.write(b" ")
    assert checkpoints.digest(folder) != wanted


# accelerate


def test_spreading_without_accelerate_is_explained(published, monkeypatch):
    monkeypatch.setattr(checkpoints.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="device is 'auto' and accelerate is not installed; needed: pip install accelerate"):
        models.load(str(published("olmoe")[0]), device="auto")


def test_layers_outside_the_gpus_are_refused(tiny_model, monkeypatch):
    model = copy.copy(tiny_model("olmoe")[0])
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match="does not fit the GPUs: 2 modules such as lm_head lie in host memory or on disk"):
        checkpoints.placed_on_gpus(model)
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    checkpoints.placed_on_gpus(model)


@pytest.mark.parametrize("key", PUBLISHED)
def test_model_that_accelerate_dispatched_gives_the_same_traces(key, published, tiny_prompts, tmp_path):
    """With its hooks on every block, on one device; run where accelerate is installed."""
    accelerate = pytest.importorskip("accelerate")
    model, tokenizer = models.load(str(published(key)[0]), device="auto", dtype="float32")
    plain = traces.collect(model, tokenizer, tiny_prompts[:3], tmp_path / "plain", 4, 3).split()
    blocks = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    blocks += [f"model.layers.{number}" for number in range(3)] + ["lm_head"]
    where = dict.fromkeys(blocks, str(model.device))
    spread = accelerate.dispatch_model(model, where, main_device=str(model.device), force_hooks=True)
    assert hasattr(spread.model.layers[2], "_hf_hook")
    found = traces.collect(spread, tokenizer, tiny_prompts[:3], tmp_path / "spread", 4, 3).split()
    for field in ("routes", "weights", "router_input", "router_logits", "layer_input"):
        assert torch.equal(getattr(plain, field), getattr(found, field))
