"""What every benchmark shares: --quick, --json, the environment, and the file that it writes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from torchrec_adaptive.serving.memory import keep_freed_memory


def parse(description: str, plot: bool = False, keep_memory: bool = True) -> argparse.Namespace:
    """The options of every benchmark.

    Args:
        description: the question that it answers.
        plot: whether the benchmark draws one.
        keep_memory: whether freed memory is kept from now on, as the server keeps it, for all peers alike; otherwise
            the allocator stays as PyTorch finds it.

    Returns:
        `quick` and `json`, and `plot` if there is one.
    """
    if keep_memory:
        keep_freed_memory()
    parser = argparse.ArgumentParser(description=description)
    if plot:
        parser.add_argument("--plot", type=Path, help="file to draw to; only without --quick")
    parser.add_argument("--quick", action="store_true", help="under 50 s, coarser")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser.parse_args()


def environment() -> dict[str, Any]:
    """What the figures depend on: machine, versions, threads, commit, date."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    packages = {}
    for name in ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": processor,
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": packages,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def report(name: str, figures: dict[str, float], options: argparse.Namespace) -> None:
    """Print the figures, and write them where `--json` says.

    Args:
        name: of the benchmark.
        figures: name to number.
        options: as `parse` gave them.
    """
    for key, value in figures.items():
        print(f"{key:32s} {value:.5g}")
    if options.json is not None:
        result = {"name": name, "figures": figures, "environment": environment() | {"quick": options.quick}}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1))
