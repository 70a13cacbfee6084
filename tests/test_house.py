"""The house itself: what lies where, who imports whom, and that every shipped run file is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.run_file import load_run_file

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("components", "ray_jobs", "pipelines")
CONFIGS = ROOT / "ray_jobs" / "configs"
RUN_FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent != CONFIGS / "suites")
MOST_LINES = 320


def python(code: str, folder: Path = ROOT) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_tests_hold_no_packages():
    """An `__init__.py` in tests/components would hide the real `components`."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_nothing_shadows_mlflow():
    assert list((ROOT / "mlflow").rglob("*.py")) == []
    found = python("import importlib.util as u; print(u.find_spec('mlflow').origin)")
    assert Path(found).is_file(), "not the folder in the repository, which is a namespace without a file"
    assert Path(found).parent != ROOT / "mlflow"


def test_modules_fit_on_a_few_screens():
    modules = [module for package in PACKAGES for module in (ROOT / package).rglob("*.py")]
    assert len(modules) > 20
    lengths = {str(module.relative_to(ROOT)): len(module.read_text().splitlines()) for module in modules}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_stage_packages_are_empty():
    """So that importing one stage imports no other library. The registry's has `load`, which imports when called."""
    filled = [
        str(init.relative_to(ROOT))
        for package in PACKAGES
        for init in (ROOT / package).rglob("__init__.py")
        if init.read_text().strip()
    ]
    assert filled == ["components/registry/__init__.py"]
    assert (
        python("import sys, components.registry; print(sorted({'torch', 'numpy', 'mlflow'} & set(sys.modules)))")
        == "[]"
    )


def test_there_are_run_files():
    assert RUN_FILES, "ray_jobs/configs holds none"


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_shipped_run_file_loads(path):
    load_run_file(path)


def test_imports_go_one_way():
    """The contracts of pyproject.toml: pipelines over ray_jobs over components, and the order of the stages."""
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [linter, "--no-logo", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 kept, 0 broken" in result.stdout


def test_the_command_line_starts_light():
    """`caltune --help` and a usage error must not wait for seconds of imports."""
    heavy = {"torch", "transformers", "ray", "mlflow", "datasets", "deepspeed", "matplotlib", "scipy", "pandas"}
    loaded = python("import sys, pipelines.cli; print(*sorted(m for m in sys.modules if '.' not in m))").split()
    assert heavy & set(loaded) == set()


def test_the_three_names_are_ours_alone():
    """They are generic, so another distribution might bring one of them too."""
    code = f"""
import importlib.metadata as m
owners = m.packages_distributions()
print(*sorted({{name for package in {PACKAGES} for name in owners.get(package, ['caltune'])}}))
"""
    assert python(code, folder=Path("/")) == "caltune"
