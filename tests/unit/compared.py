"""Run examples/compare_methods.sh with programs that write results without training."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.launched import RECORDER, Launched, Launcher

NAME = "compare_methods"
METHODS = ["uniform", "natural", "unimax", "chameleon", "doremi", "doge", "regmix", "mixing-laws"]
CORPUS = "runs/quickstart/1-corpus"
# Concurrent programs write whole lines.
ONE_AT_A_TIME = '#!/usr/bin/env bash\nexec 9>> "$CALLS.lock"\nflock 9\n'
# Writes the outputs of the real program: a mixture whose weights depend on its name (UniMax's are
# uniform's), a finished run, a result. The command that writes to a path with $FAILS in it fails
# with status $FAILS_WITH.
WORKER = """
while (($#)); do
  case $1 in
    --output | --run-dir)
      mkdir -p "$(dirname "$2")"
      if [[ -n ${FAILS:-} && $2 == */$FAILS* ]]; then
        echo "error: it is $FAILS" >&2
        exit "${FAILS_WITH:-2}"
      fi
      case $1 in
        --run-dir) mkdir -p "$2"; echo '"status": "finished"' > "$2/run.json" ;;
        *) name=$(basename "$2" .json); name=${name/unimax/uniform}
          printf '  "weights": {\\n    "a": 0.%09d\\n  }\\n' \\
            "$(cksum <<< "$name" | cut -c-8)" > "$2" ;;
      esac
      ;;
  esac
  shift
done
"""
# The real tool checks the choice. An evaluation is valid unless it contains "of other weights";
# tests/launchers calls the real check of evaluations.
CHECKS = f"""#!/usr/bin/env bash
case " $* " in
  *" --check choice "*) exec {sys.executable} "$@" ;;
  *" --check evaluations "*)
    [[ " $* " =~ " --run "([^ ]*)" --mixtures "([^ ]*)" " ]] || exit 1
    ! grep -qs "of other weights" "${{BASH_REMATCH[1]}}/6-evaluation/${{BASH_REMATCH[2]}}-seed"*
    exit ;;
esac
"""


class Workers(Launcher):
    """A launcher whose programs write results, on which later stages depend."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in ("torchrun", "python"):
            text = f"{CHECKS}{ONE_AT_A_TIME}{RECORDER}exec 9>&-\n{WORKER}"
            (self.programs / name).write_text(text)


def small(launch: Launcher, **choices: str) -> Launched:
    return launch(
        NAME, **{"SIZE": "mini", "CORPUS": CORPUS, "METHODS": "uniform chameleon"} | choices
    )


def papers(launch: Launcher, **choices: str) -> Launched:
    return launch(NAME, **{"SIZE": "paper", **choices})
