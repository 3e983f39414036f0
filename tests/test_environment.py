"""The lock is closed, agrees with PyPI's torch and environment.yml, and the installer says what it needs."""

import ast
import importlib.util
import subprocess
import sys
from importlib import metadata

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from dualdeadline import paths

LOCK = paths.LIB / "requirements.lock"
PLATFORMS = {f"{system} {python}": default_environment() | {
    "sys_platform": system.lower(), "platform_system": system, "os_name": "posix", "platform_machine": machine,
    "python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for system, machine in (("Linux", "x86_64"), ("Darwin", "arm64")) for python in ("3.11", "3.12", "3.13")}


def specs(path):
    return [Requirement(line.split("#")[0]) for line in path.read_text().splitlines()
            if line.split("#")[0].strip() and not line.startswith("-c")]


def pins(environment=None):
    """Canonical name -> version of the lines of the lock that count in an environment."""
    found = {}
    for spec in specs(LOCK):
        if environment is None or spec.marker is None or spec.marker.evaluate(environment):
            (only,) = spec.specifier
            assert only.operator == "==" and not Version(only.version).local, f"{spec} is no plain pin"
            found[canonicalize_name(spec.name)] = only.version
    return found


def torch_requires():
    """What torch asks for on PyPI: the wheel installed here may be one for CPUs that asks for less."""
    lines = (paths.TESTS / "data" / "torch-2.13.0-requires.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def unmet(environment):
    """Requirements of locked packages that the lock (or, for CUDA packages, the constraints) does not meet."""
    locked = pins(environment)
    allowed = locked | {canonicalize_name(spec.name): next(iter(spec.specifier)).version
                        for spec in specs(paths.LIB / "constraints-cuda.txt")}
    wanted = [(name, "", requirement) for name in locked if name != "torch"
              for requirement in map(Requirement, _requires(name))]
    wanted += [("torch", "", requirement) for requirement in torch_requires()]
    seen, problems = set(), []
    while wanted:
        owner, extra, need = wanted.pop()
        if (owner, extra, str(need)) in seen or (need.marker and not need.marker.evaluate(environment | {"extra": extra})):
            continue
        seen.add((owner, extra, str(need)))
        name = canonicalize_name(need.name)
        if not need.specifier.contains(allowed.get(name, "0"), prereleases=True) or name not in allowed:
            problems.append(f"{owner} needs {need}, locked is {allowed.get(name)}")
        wanted += [(name, each, requirement) for each in need.extras for requirement in map(Requirement, _requires(name))]
    return problems


def _requires(name):
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []  # a package for another platform


@pytest.mark.parametrize("platform", PLATFORMS)
def test_lock_is_closed(platform):
    assert unmet(PLATFORMS[platform]) == []


def test_wrong_and_missing_pins_are_found(monkeypatch):
    environment = PLATFORMS["Linux 3.12"]
    wrong = pins(environment) | {"triton": "3.6.0"}
    del wrong["regex"]
    monkeypatch.setitem(globals(), "pins", lambda _: wrong)
    found = " ".join(unmet(environment))
    assert "torch needs triton==3.7.1" in found and "locked is 3.6.0" in found
    assert "transformers needs regex" in found


def test_torch_and_triton_are_what_the_study_was_made_with():
    for platform, environment in PLATFORMS.items():
        locked = pins(environment)
        assert locked["torch"] == "2.13.0" and locked["transformers"] == "5.17.0"
        assert locked.get("triton") == ("3.7.1" if platform.startswith("Linux") else None)


def test_installed_versions_are_the_locked_ones():
    here = {canonicalize_name(each.metadata["Name"]): Version(each.version) for each in metadata.distributions()}
    different = {name: (str(here[name]), version) for name, version in pins(default_environment()).items()
                 if name in here and here[name].public != version}
    assert not different
    missing = set(pins(default_environment())) - set(here)
    assert missing <= {"pycosat"}, missing  # left out where there is no compiler


def test_environment_has_no_conflicts():
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "requires pycosat, which is not installed" not in line]
    assert done.returncode == 0 or not lines, done.stdout


def test_nothing_is_imported_that_is_not_locked():
    distributions = metadata.packages_distributions()
    allowed = set(pins())
    for path in [*paths.PACKAGE.rglob("*.py"), *paths.TESTS.glob("*.py"), *paths.NOTEBOOKS.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else (
                [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else [])
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"dualdeadline"}:
                found = {canonicalize_name(each) for each in distributions.get(top, [])}
                local = (paths.TESTS / f"{top}.py").exists()
                assert local or found & allowed, f"{path.name} imports {top}, which the lock does not name"


def test_conda_environment_has_the_same_pins():
    entry = yaml.safe_load((paths.ROOT / "environment.yml").read_text())
    assert set(entry) == {"name", "channels", "dependencies"} and entry["name"] == "dualdeadline"
    *conda, last = entry["dependencies"]
    assert [Requirement(spec).name for spec in conda] == ["python", "pip"]
    versions = Requirement(conda[0]).specifier
    assert [minor for minor in range(9, 16) if versions.contains(f"3.{minor}.1")] == [11, 12, 13]
    constraint, *named = last["pip"]
    assert constraint == "-c lib/requirements.lock" and (paths.ROOT / constraint.split()[1]).exists()
    first_part = LOCK.read_text().split("# What those need")[0]
    expected = [line for line in first_part.splitlines() if "==" in line and not line.startswith("#")]
    assert named == expected


def test_metadata_asks_for_the_pythons_that_the_lock_serves():
    import tomllib

    project = tomllib.loads((paths.LIB / "pyproject.toml").read_text())["project"]
    versions = Requirement(f"x{project['requires-python']}").specifier
    assert [minor for minor in range(9, 16) if versions.contains(f"3.{minor}.1")] == [11, 12, 13]


@pytest.fixture(scope="module")
def installer():
    spec = importlib.util.spec_from_file_location("install", paths.LIB / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wrong_python_is_told_what_is_needed(installer):
    assert [installer.check_python((3, minor)) is None for minor in (10, 11, 12, 13, 14)] == [0, 1, 1, 1, 0]
    assert "is Python 3.9; needed: 3.11, 3.12 or 3.13" in installer.check_python((3, 9))


def test_installer_can_be_read_by_an_old_python():
    ast.parse((paths.LIB / "install.py").read_text(), feature_version=(3, 6))


def test_unfinished_or_other_environment_is_made_again(installer, tmp_path):
    wanted = installer.fingerprint()
    assert not installer.up_to_date(str(tmp_path), wanted)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert not installer.up_to_date(str(tmp_path), wanted)  # killed before the stamp
    (tmp_path / "installed.json").write_text(f'{{"fingerprint": "{wanted}"}}')
    assert installer.up_to_date(str(tmp_path), wanted)
    assert not installer.up_to_date(str(tmp_path), "another lock")


def test_both_halves_of_the_lock_are_the_lock(installer):
    parts = installer.two_parts(LOCK.read_text())
    names = [canonicalize_name(Requirement(line).name) for part in parts for line in part]
    assert sorted(names) == sorted(pins()) and min(map(len, parts)) > len(names) // 4


def test_without_compiler_only_one_package_is_missing(installer):
    text, alone = installer.without_compiler(LOCK.read_text())
    assert [Requirement(line).name for line in alone] == ["reasoning-gym"]
    left = {canonicalize_name(Requirement(line).name) for line in text.splitlines()
            if "==" in line and not line.startswith("#")}
    assert set(pins()) - left == {"pycosat", "reasoning-gym"}
