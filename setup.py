"""Install megatron_chameleon. Requirements are version ranges; constraints.txt pins exact versions.

Ranges let ``pip install -e .`` keep packages that are already installed. This matters in NVIDIA's
PyTorch container, whose torch, Transformer Engine, Apex and Triton were built for each other:

* torch's lower bound is a pre-release, because the container's torch is a pre-release
  (2.9.0a0+...), which pip would replace if the bound were ``>=2.9``.
* Triton is not listed. CUDA builds of torch install the matching version of Triton, and installing
  another version over it breaks torch.compile. The make targets install Triton explicitly, since
  torch's CPU build does not. megatron-core needs it from 0.18 on; a command that trains or embeds
  reports in one line that it is missing.
* megatron-core 0.16 is the last release for Python 3.11, and its support ends with that of Python
  3.11. The upper bound is the newest minor release that passes all tests.
* NVIDIA's Apex and Transformer Engine are part of the container and are used if they are installed.
  Apex is never listed, because the package index has an unrelated project of the same name.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def constant(name: str, file: str) -> str:
    """Read a string from a file of the package without importing it."""
    source = (ROOT / "megatron_chameleon" / file).read_text(encoding="utf-8")
    found = re.search(rf'^{name} = "([^"]+)"', source, re.MULTILINE)
    assert found is not None
    return found.group(1)


setup(
    name="megatron-chameleon",
    version=constant("__version__", "__init__.py"),
    description="Data mixing by kernel ridge leverage scores, on megatron-core",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the megatron_chameleon authors",
    license_expression="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_chameleon", "megatron_chameleon.*"]),
    package_data={
        "megatron_chameleon": [
            "py.typed",
            "interchange/published_columns.json",
            "commands/quickstart.sh",
            "report/paper_results.json",
            "report/template/*",
        ]
    },
    entry_points={"console_scripts": ["megatron-chameleon = megatron_chameleon.commands:main"]},
    install_requires=[
        # Model, parallelism, data files and checkpoints.
        "torch>=2.9.0a0",
        "megatron-core" + constant("SUPPORTED", "parallel/releases.py"),
        # megatron-core's checkpoint writer hangs without psutil, but does not declare it.
        "psutil>=5.9",
        # Numerical computation.
        "numpy>=1.26",
        "scipy>=1.11",
        "numba>=0.60",
        # Clustering of documents into domains.
        "scikit-learn>=1.4",
        # RegMix's regression.
        "lightgbm>=4.3",
        # Reading and tokenizing text.
        "tokenizers>=0.20",
        "sentencepiece>=0.2",
        "orjson>=3.9",
        # Text and tokens at URLs.
        "fsspec>=2024.6",
        "xxhash>=3.4",
        "zstandard>=0.22",
        # Artifacts, options and progress.
        "safetensors>=0.4.3",
        "huggingface_hub>=0.26",
        "pydantic>=2.6",
        "docstring-parser>=0.16",
        "pyyaml>=6",
        "tyro>=1.0",
        "tqdm>=4.66",
        # Tables, figures and page of the report.
        "jinja2>=3.1",
        "matplotlib>=3.8",
        "pandas>=2.2",
        # Training curves. Without TensorBoard, a run logs a warning and continues.
        "tensorboard>=2.16",
    ],
    extras_require={
        # Parquet, Hugging Face datasets by name, tiktoken files, gigatoken, a fast encoder, and
        # rensa, for MinHash.
        "data": ["pyarrow>=17", "datasets>=4", "tiktoken>=0.8", "gigatoken>=0.10", "rensa>=0.5"],
        # Our code that loads tasks follows lm-eval 0.4.13.
        "eval": ["lm-eval>=0.4.13,<0.5"],
        # Loads proxies in Hugging Face format, and the folders that tools/convert_checkpoint.py
        # writes; the tool itself needs no extra.
        "hf": ["transformers>=4.56"],
        # --optimizer muon, with megatron-core 0.18 or newer.
        "muon": ["emerging-optimizers>=0.3"],
        # The report's map of windows, which uses PCA if umap-learn is not installed.
        "plots": ["umap-learn>=0.5.9", "threadpoolctl>=3.1"],
        # Runs tasks on the machines of a cluster: shards of a corpus, members of a swarm.
        "ray": ["ray>=2.40"],
        # s3:// and gs://. fsspec is their common interface.
        "storage": ["s3fs>=2024.6", "gcsfs>=2024.6"],
        "wandb": ["wandb>=0.17"],
        # The client of an MLflow server. A database as tracking store needs the package mlflow.
        "mlflow": ["mlflow-skinny>=2.16"],
        # Build of the documentation.
        "docs": [
            "latex2mathml>=3.77",
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.6,<10",
            "mkdocstrings[python]>=1,<2",
            "pymdown-extensions>=10.9",
        ],
        "dev": [
            # Required by lm-eval's `hf` model, with which tests compare our lm-eval model.
            "accelerate>=1.0",
            "emerging-optimizers>=0.3; python_version >= '3.12'",
            # A local S3 server, which needs both Flask packages, and the client that is tested.
            "flask>=3",
            "flask-cors>=4",
            "moto[s3]>=5",
            "s3fs>=2024.6",
            "hypothesis>=6.100",
            "import-linter>=2.1",
            # Its store of files takes the place of a server in tests.
            "mlflow-skinny>=2.16",
            # Execute the notebooks.
            "ipykernel>=6.29",
            "nbclient>=0.10",
            "mypy>=1.13",
            # Tests the report's page in an installed browser; downloads no browser of its own.
            "playwright>=1.50",
            "pre-commit>=3.6",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "ruff>=0.9",
        ],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
