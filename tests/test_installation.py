"""The wheel: built, installed into a clean environment, imported there; and the README's example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path)
    (wheel,) = tmp_path.glob("torchrec_adaptive-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    run(*pip, "-r", str(ROOT / "requirements" / "torch.txt"), cwd=tmp_path)
    run(*pip, "--no-deps", "-r", str(ROOT / "requirements" / "runtime.txt"), str(wheel), cwd=tmp_path)
    code = "import torchrec_adaptive as t; print(t.__file__); [getattr(t, name) for name in t.__all__]"
    assert str(tmp_path / "venv") in run(python, "-c", code, cwd=tmp_path)

    site = next((tmp_path / "venv" / "lib").glob("python3.*")) / "site-packages"
    assert (site / "torchrec_adaptive" / "py.typed").exists()
    both = site / "fbgemm_gpu-1.8.0.dist-info"  # as pip leaves it when the CUDA build comes on top of the CPU one
    both.mkdir()
    (both / "METADATA").write_text("Metadata-Version: 2.1\nName: fbgemm-gpu\nVersion: 1.8.0\n")
    done = subprocess.run(
        [python, "-c", "import torchrec_adaptive"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: torchrec-adaptive found both builds of fbgemm")
    assert "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu" in last


def test_the_readmes_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["logits"].shape == (500, 1)  # type: ignore[attr-defined]


def test_the_versions_agree() -> None:
    import torchrec_adaptive

    assert f'VERSION = "{torchrec_adaptive.__version__}"' in (ROOT / "setup.py").read_text()
    pins = (ROOT / "requirements" / "runtime.txt").read_text() + (ROOT / "requirements" / "torch.txt").read_text()
    for pin in ("torch==2.13.0", "torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0"):
        assert pin in pins
