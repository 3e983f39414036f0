"""Make the environment: python lib/install.py [folder, default .venv].

Standard library only, and syntax that an old Python can read, so that it can say that it is too old. Does
nothing when the environment is there and made from the same lock; a stamp is written last, so a killed run is
redone.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

LIB = os.path.dirname(os.path.abspath(__file__))
OLDEST, NEWEST = (3, 11), (3, 13)
# pycosat has no wheels and serves one puzzle generator that the study never calls
NEEDS_COMPILER = ("pycosat", "reasoning-gym")
# what the study imports; compiled once at the end, unlike the rest of the packages
IMPORTED = (("torch", "transformers.models.olmoe.modeling_olmoe", "safetensors.torch"),
            ("pandas", "seaborn", "dask.distributed", "pyarrow.parquet", "papermill", "ipykernel.kernelapp", "jupytext",
             "nbclient"))  # side by side
LARGE = ("torch", "triton", "transformers", "tokenizers", "safetensors")  # half of the time
PLACEHOLDER = """def itersolve(*_):
    raise ImportError("pycosat was left out: it needs a C compiler and Python's headers")
"""


def check_python(version):
    """Error text if this Python cannot run the project, else None; `version` is (major, minor)."""
    if OLDEST <= tuple(version) <= NEWEST:
        return None
    got = "%s is Python %d.%d" % (sys.executable, version[0], version[1])
    return got + "; needed: 3.11, 3.12 or 3.13. Install one, or name it: make PYTHON=/path/to/python3.12"


def fingerprint():
    """What the environment depends on: lock, constraints, package metadata, and where the checkout lies."""
    digest = hashlib.sha256(LIB.encode())
    for name in ("requirements.lock", "constraints-cuda.txt", "pyproject.toml", "install.py"):
        with open(os.path.join(LIB, name), "rb") as handle:
            digest.update(handle.read())
    return digest.hexdigest()


def up_to_date(folder, wanted):
    """Whether `folder` holds a finished environment with that fingerprint."""
    stamp = os.path.join(folder, "installed.json")
    if not (os.path.exists(stamp) and os.path.exists(os.path.join(folder, "bin", "python"))):
        return False
    with open(stamp) as handle:
        text = handle.read()
    return wanted in text


def create(folder):
    """A virtual environment in `folder`; one whose Python no longer runs is replaced."""
    python = os.path.join(folder, "bin", "python")
    if os.path.exists(python):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if subprocess.call([python, "-m", "pip", "--version"], **quiet) == 0:
            return python
        shutil.rmtree(folder)
    if subprocess.call([sys.executable, "-m", "venv", folder]) != 0:
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit("%s cannot make a virtual environment; needed: the modules venv and ensurepip "
                 "(Debian and Ubuntu: apt-get install python3-venv)" % sys.executable)
    return python


def path_of(python, name):
    """A folder of `python` by its sysconfig name, such as include or purelib."""
    ask = "import sysconfig; print(sysconfig.get_path('%s'))" % name
    return subprocess.check_output([python, "-c", ask]).decode().strip()


def can_compile(python):
    """Whether a C compiler and the headers of `python` are there."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and os.path.exists(os.path.join(path_of(python, "include"), "Python.h"))


def without_compiler(lock):
    """Lines of the lock that install without a compiler, and what to add without its dependencies."""
    named = [(re.split("[=;@ ]", line)[0].lower(), line) for line in lock.splitlines()]
    rest = [line for name, line in named if name not in NEEDS_COMPILER]
    return "\n".join(rest) + "\n", [line for name, line in named if name == NEEDS_COMPILER[1]]


def install_without_compiler(python, folder, pip):
    """Everything but pycosat; reasoning-gym imports it, so a module that refuses to work takes its place."""
    print("No C compiler or no Python headers: pycosat is left out (an unused puzzle generator needs it)")
    with open(os.path.join(LIB, "requirements.lock")) as handle:
        text, alone = without_compiler(handle.read())
    reduced = os.path.join(folder, "without-compiler.txt")
    with open(reduced, "w") as handle:
        handle.write(text.replace("-c constraints", "-c " + os.path.join(LIB, "constraints")))
    install_lock(pip, folder, reduced)
    run(pip + ["--no-deps"] + alone)
    with open(os.path.join(path_of(python, "purelib"), "pycosat.py"), "w") as handle:
        handle.write(PLACEHOLDER)


def two_parts(lock):
    """Lines of the lock as two lists that take about as long: large packages and a third of the rest; the others."""
    lines = [line for line in lock.splitlines() if "==" in line and not line.startswith(("#", "-"))]
    large = [line for line in lines if re.split("[=;@ ]", line)[0].lower() in LARGE]
    rest = [line for line in lines if line not in large]
    return large + rest[::3], rest[1::3] + rest[2::3]


def install_lock(pip, folder, lock):
    """Two halves of the lock side by side, then what pip says is missing, such as a GPU build's CUDA libraries."""
    with open(lock) as handle:
        parts = two_parts(handle.read())
    running = []
    for number, lines in enumerate(parts):
        name = os.path.join(folder, "part%d.txt" % (number + 1))
        with open(name, "w") as handle:
            handle.write("\n".join(lines) + "\n")
        command = pip + ["--no-deps"] + ["--quiet"] * number + ["-r", name]
        running.append((command, subprocess.Popen(command)))
    for command, started in running:
        started.wait()
    for command, started in running:
        check(command, started.returncode)
    if subprocess.call(pip[: pip.index("install")] + ["check"], stdout=subprocess.DEVNULL) != 0:
        run(pip + ["--quiet", "-r", lock])


def install(python, folder):
    """Install the lock, then the library in editable form, then the kernel that the notebooks name."""
    # compiling every module of every package takes longer than all else; what is imported compiles itself once
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
    if can_compile(python):
        install_lock(pip, folder, os.path.join(LIB, "requirements.lock"))
    else:
        install_without_compiler(python, folder, pip)
    run(pip + ["--no-deps", "--no-build-isolation", "--quiet", "-e", LIB])
    # the notebooks' header says display name python3; JupyterLab writes the kernel's own name on saving
    kernel = ["--sys-prefix", "--name", "python3", "--display-name", "python3"]
    run([python, "-m", "ipykernel", "install"] + kernel)
    warm = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    print("Compiling what the notebooks import", flush=True)
    for started in [subprocess.Popen([python, "-c", "import " + ", ".join(names)], env=warm) for names in IMPORTED]:
        started.wait()


def run(command):
    """Run a command; if it fails, stop with what to do."""
    check(command, subprocess.call(command))


def check(command, status):
    """Stop with what to do if a command ended with another status than 0."""
    if status != 0:
        sys.exit("Failed: %s\nWhat is there is kept; the same make command goes on." % " ".join(command))


def main(folder):
    error = check_python(sys.version_info[:2])
    if error:
        sys.exit(error)
    wanted = fingerprint()
    if up_to_date(folder, wanted):
        return
    print("Making %s with %s (2 minutes, about 2 GB on a CPU machine)" % (folder, sys.executable), flush=True)
    python = create(folder)
    install(python, folder)
    stamp = os.path.join(folder, "installed.json")
    with open(stamp + ".new", "w") as handle:
        json.dump({"fingerprint": wanted, "python": sys.version.split()[0]}, handle)
    os.replace(stamp + ".new", stamp)


if __name__ == "__main__":
    try:
        main(os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(LIB, os.pardir, ".venv")))
    except KeyboardInterrupt:
        sys.exit(130)
