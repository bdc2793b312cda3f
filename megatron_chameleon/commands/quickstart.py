"""Run the whole pipeline on text of the installed packages, in minutes on two CPU cores."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from pathlib import Path

from megatron_chameleon.cli import Tool
from megatron_chameleon.errors import UserError


@dataclasses.dataclass(frozen=True)
class QuickstartOptions:
    """Run the whole pipeline: text, tokens, proxy, mixtures, three models, perplexity, report.

    The text comes from the installed packages, so nothing is downloaded. The same command resumes
    after an interruption. Sizes and steps are environment variables: TARGET (reference_prose), SIZE
    (nano), STEPS (400), WARMUP (160) and SEED (1).
    """

    run_dir: Path | None = None
    """Output folder; default: the environment variable RUN, or runs/quickstart."""


def main(options: QuickstartOptions) -> None:
    """Replace this process by the script, which runs the other commands.

    Raises:
        UserError: if bash is not installed.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise UserError(
            "bash is not on the PATH; install it, since the quickstart is a bash script"
        )
    script = str(Path(__file__).with_suffix(".sh"))
    environment = {**os.environ, "PYTHON": sys.executable}
    if options.run_dir is not None:
        environment["RUN"] = str(options.run_dir)
    os.execve(bash, ["bash", script], environment)


COMMAND = Tool(main, QuickstartOptions)
