"""Installs megatron_chameleon. Everything here is a range; exact pins are in constraints.txt.

Ranges let ``pip install -e .`` keep what is already installed. That matters in NVIDIA's PyTorch
container, whose torch, Transformer Engine, Apex and Triton belong together:

* torch's lower bound is a pre-release, because the container's torch is one (2.9.0a0+...), and
  a plain ``>=2.9`` would replace it.
* Triton is not listed. CUDA builds of torch bring the one they were made with; a second one over
  it breaks torch.compile. The make targets name it, since torch's CPU build brings none.
* NVIDIA's Apex and Transformer Engine come with the container and are used when they are there.
  The package index has an unrelated project under Apex's name, so it is never listed.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def package_version() -> str:
    """Read ``__version__`` from the package without importing it."""
    source = (ROOT / "megatron_chameleon" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    assert found is not None
    return found.group(1)


setup(
    name="megatron-chameleon",
    version=package_version(),
    description="Data mixing by kernel ridge leverage scores, on megatron-core",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the megatron_chameleon authors",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_chameleon", "megatron_chameleon.*"]),
    package_data={
        "megatron_chameleon": [
            "py.typed",
            "artifacts/published_columns.json",
            "report/paper_results.json",
            "report/template/*",
        ]
    },
    install_requires=[
        # The model, its parallelism, its data files and its checkpoints.
        "torch>=2.9.0a0",
        "megatron-core>=0.16,<0.17",
        # megatron-core's checkpoint writer hangs without it and does not declare it.
        "psutil>=5.9",
        # Numerics.
        "numpy>=1.26",
        "scipy>=1.11",
        "numba>=0.60",
        # The clusters of discovered domains.
        "scikit-learn>=1.4",
        # The regression of RegMix.
        "lightgbm>=4.3",
        # Text in, tokens out.
        "tokenizers>=0.20",
        "sentencepiece>=0.2",
        "orjson>=3.9",
        "xxhash>=3.4",
        "zstandard>=0.22",
        # Artifacts, options and progress.
        "safetensors>=0.4.3",
        "huggingface_hub>=0.26",
        "pydantic>=2.6",
        "docstring-parser>=0.16",
        "tyro>=1.0",
        "tqdm>=4.66",
        # The report.
        "jinja2>=3.1",
        "matplotlib>=3.8",
        "pandas>=2.2",
        # Training curves; a run without it logs a warning and continues.
        "tensorboard>=2.16",
    ],
    extras_require={
        # Parquet, data sets by name, tiktoken's files, and the fast encoder.
        "data": ["pyarrow>=17", "datasets>=4", "tiktoken>=0.8", "gigatoken>=0.10"],
        # Tasks are loaded as in 0.4.13.
        "eval": ["lm-eval>=0.4.13,<0.5"],
        # To open the Hugging Face folders that tools/convert_checkpoint.py writes; it needs none.
        "hf": ["transformers>=4.46"],
        # The map of windows; the report falls back to PCA without umap-learn.
        "plots": ["umap-learn>=0.5.9", "threadpoolctl>=3.1"],
        "wandb": ["wandb>=0.17"],
        # To build the pages of docs/.
        "docs": [
            "latex2mathml>=3.77",
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.6,<10",
            "pymdown-extensions>=10.9",
        ],
        "dev": [
            # lm-eval's own model for transformers, which ours is compared with.
            "accelerate>=1.0",
            "hypothesis>=6.100",
            "import-linter>=2.1",
            "mypy>=1.13",
            # Drives a browser of the system through the report's page; it needs no other.
            "playwright>=1.50",
            "pre-commit>=3.6",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "ruff>=0.9",
        ],
    },
    classifiers=[
        "License :: OSI Approved :: MIT License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
