import os
import subprocess
import sys
from pathlib import Path


def test_without_a_gpu_the_benchmark_ends_with_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_broadcast_ops", "--quick"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip().splitlines()[-1].startswith("gpu_broadcast_ops needs a CUDA device")
