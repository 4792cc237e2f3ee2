"""The distribution `torchrec-adaptive`."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = "0.1.0"

# The CUDA fbgemm-gpu owns the same module folder as fbgemm-gpu-cpu, and torchrec's wheel always asks for the former:
# so torchrec and fbgemm are in the extra `gpu`, and a CPU user installs both with --no-deps (see README.md).
EXTRAS = {
    "gpu": ["torchrec==1.8.*", "fbgemm-gpu==1.8.*"],
    "torchx": ["torchx>=0.7,<0.8"],
    "serving": ["starlette>=0.40", "uvicorn>=0.30", "httptools", "uvloop", "prometheus-client>=0.20"],
    "parquet": ["pyarrow>=15"],
    "dev": [
        "pytest>=8",
        "hypothesis",
        "ruff",
        "pyrefly",
        "build",
        "matplotlib",
        "tensorboard",
        "triton>=3.8",
        "tritonclient[http]>=2.60",
    ],
}

setup(
    name="torchrec-adaptive",
    version=VERSION,
    description="Request-oriented ranking models of LLM scale on TorchRec: train, publish, serve, update in place",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    python_requires=">=3.10",
    packages=find_packages(include=["torchrec_adaptive", "torchrec_adaptive.*"]),
    package_data={"torchrec_adaptive": ["py.typed"]},
    install_requires=[
        "torch==2.13.*",
        "numpy>=1.26",
        "safetensors>=0.4",
        "fsspec>=2024.2",
        "tensordict",
        "torchmetrics==1.0.3",
        "pyre-extensions",
        "tqdm",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["torchrec-adaptive=torchrec_adaptive.cli.main:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
