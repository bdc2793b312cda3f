"""examples/compare_methods.sh started without training: its programs leave results at once."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.launched import RECORDER, Launched, Launcher

NAME = "compare_methods"
METHODS = ["uniform", "natural", "unimax", "chameleon", "doremi", "doge", "regmix", "mixing-laws"]
CORPUS = "runs/quickstart/1-corpus"
# Two of them do not write into each other's line.
ONE_AT_A_TIME = '#!/usr/bin/env bash\nexec 9>> "$CALLS.lock"\nflock 9\n'
# Leaves what the real one would leave: a mixture of weights by its name (UniMax's are uniform's), a
# finished run, a result. Given FAILS, the command that writes below that name fails, with
# the status FAILS_WITH.
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
# The choice is checked by the real tool. An evaluation is good unless it says otherwise; the real
# check of evaluations is called in tests/launchers.
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
    """A launcher whose programs leave results, so that what waits for them goes on."""

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
