"""JupyterLab opens every pair whatever the files' times, and writes an edit to the text file."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from dualdeadline import notebook, paths

TOKEN = "test"
TEXTS = sorted(notebook.sources())


class Lab:
    """A running JupyterLab over a copy of the notebooks."""

    def __init__(self, folder: Path, address: str):
        self.folder, self.address = folder, address

    def ask(self, path: str, method: str = "GET", body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, method=method, headers={
            "Authorization": f"token {TOKEN}", "Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            pytest.fail(f"{method} {path}: {error.code} {error.read().decode()[:500]}")

    def open(self, stage: str):
        return self.ask(f"api/contents/{stage}.ipynb?type=notebook&content=1")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on copies whose text and notebook have random times, far apart, as after a clone or an unpacking."""
    folder, runtime = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("runtime")
    shutil.copy(paths.NOTEBOOKS / "jupytext.toml", folder)
    times = random.Random(0)
    for stage, text in notebook.sources().items():
        shutil.copy(text, folder)
        notebook.write(notebook.load(text), folder / f"{stage}.ipynb")
    for path in folder.iterdir():
        when = time.time() - times.uniform(10, 1e6)
        os.utime(path, (when, when))
    command = [sys.executable, "-m", "jupyter", "lab", str(folder), "--no-browser", "--allow-root", "--port=0",
               f"--IdentityProvider.token={TOKEN}"]
    environment = os.environ | {"JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_PREFER_ENV_PATH": "1"}
    with open(runtime / "log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        yield Lab(folder, _address(runtime, server))
    finally:
        server.terminate()
        server.wait(30)


def _address(runtime: Path, server: subprocess.Popen) -> str:
    for _ in range(600):
        found = list(runtime.glob("jpserver-*.json"))
        if found:
            return json.loads(found[0].read_text())["url"]
        assert server.poll() is None, (runtime / "log").read_text()
        time.sleep(0.1)
    raise AssertionError((runtime / "log").read_text())


@pytest.mark.parametrize("stage", TEXTS)
def test_opens_with_its_kernel_and_saving_keeps_the_text(lab, stage):
    text = lab.folder / f"{stage}.py"
    before = text.read_bytes()
    model = lab.open(stage)
    assert model["content"]["metadata"]["kernelspec"]["name"] == "python3"
    expected = [cell.source for cell in notebook.load(text).cells]
    assert [cell["source"] for cell in model["content"]["cells"]] == expected
    # JupyterLab writes the running kernel's own names into the notebook
    model["content"]["metadata"]["kernelspec"] = _shown(lab)
    lab.ask(f"api/contents/{stage}.ipynb", "PUT", {"type": "notebook", "format": "json", "content": model["content"]})
    assert text.read_bytes() == before


def _shown(lab) -> dict:
    spec = lab.ask("api/kernelspecs")["kernelspecs"]["python3"]["spec"]
    return {"display_name": spec["display_name"], "language": spec["language"], "name": "python3"}


def test_kernel_is_this_environment(lab):
    spec = lab.ask("api/kernelspecs")["kernelspecs"]["python3"]["spec"]
    assert spec["display_name"] == "python3"
    assert Path(spec["argv"][0]).parent == Path(sys.executable).parent


def test_edits_reach_the_text_both_ways(lab):
    stage = TEXTS[0]
    text = lab.folder / f"{stage}.py"
    model = lab.open(stage)
    model["content"]["cells"][-1]["source"] += "\nWritten in the Lab."
    lab.ask(f"api/contents/{stage}.ipynb", "PUT", {"type": "notebook", "format": "json", "content": model["content"]})
    assert "Written in the Lab." in text.read_text()
    # an edit of the text wins over the notebook, even if the text file looks older
    text.write_text(text.read_text().replace("Written in the Lab.", "Written in an editor."))
    os.utime(text, (1e9, 1e9))
    assert "Written in an editor." in lab.open(stage)["content"]["cells"][-1]["source"]
