# shellcheck shell=bash
# Sourced by the launchers: from the choices in the environment to the arguments of torchrun and of
# the tools. A launcher has its own SIZE, RUN, CORPUS and MIXTURE; all of them take
#   SEED         of the initial weights and of the order of samples (1)
#   TP, PP       tensor- and pipeline-parallel degree; the other ranks are data parallel (1, 1)
#   NPROC        ranks on each node (one for each GPU; without any, one for each core)
#   NNODES       nodes; on each the launcher is started, with its own NODE_RANK (SLURM says it) and
#                with the first one's MASTER_ADDR (1)
#   STOP_AT      Unix time at which to save and leave, to go on later by the same command (never)
# and, after --, any flag of tools/pretrain_gpt.py; launchers that train nothing take those of the
# tool that they start.
HERE=$(dirname "${BASH_SOURCE[0]}")
TOOLS=$HERE/../tools
LAUNCHER=$(basename "$0" .sh)

refuse() {
  echo "error: $*" >&2
  exit 2
}

if [ "${1:-}" = --help ]; then
  sed -sn '2,/^[^#]/ s/^# \{0,1\}//p' "$0" "$HERE/launch.sh"
  exit
fi
[ $# = 0 ] || [ "$1" = -- ] ||
  refuse "$1: choices are environment variables (--help names them), flags come after --"
EXTRA=("${@:2}")

if [ "$SIZE" = tiny ]; then
  RUN=${RUN:-runs/tiny/$LAUNCHER}
  CORPUS=${CORPUS:-runs/quickstart/1-corpus}
  PRETRAINED=${PRETRAINED:-runs/tiny/pretrain_684m_pile/5-base/uniform-seed1}
  PROXY=${PROXY:-runs/tiny/pretrain_82m_proxy/2-proxy/tiny-seed1}
  [[ $LAUNCHER == finetune_* ]] || MIXTURE=${MIXTURE:-uniform}   # nothing is there to be weighed by
  NPROC=${NPROC:-2}
  export CUDA_VISIBLE_DEVICES=           # one GPU would not take two ranks
  export TORCHDYNAMO_DISABLE=1           # only GPUs use the compiler, which takes a second to load
fi
SEED=${SEED:-1}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
RANKS=(--nproc-per-node "${NPROC:-auto}")
if [ "$NNODES" = 1 ]; then
  RANKS+=(--standalone)
else
  RANKS+=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-port "${MASTER_PORT:-29500}"
    --master-addr "${MASTER_ADDR:?is the name of the first of NNODES nodes}")
fi
PARALLEL=(--tensor-model-parallel-size "${TP:-1}" --pipeline-model-parallel-size "${PP:-1}")
ALONE=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1)   # overrides PARALLEL
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# What torchrun gives its ranks to save and leave when it is ended itself; 30 seconds may be few.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}

# shellcheck source=examples/hyperparameters.sh
source "$HERE/hyperparameters.sh"

say() { printf '\n== %s\n' "$*"; }

on_first_node() { [ "$NODE_RANK" != 0 ] || "$@"; }

# choose EXPERIMENT RECIPE: fill the arrays of flags; RECIPE in examples/data makes the corpus.
choose() {
  hyperparameters "$1" "$SIZE"
  [ -e "$CORPUS/corpus.json" ] || refuse "there is no corpus in $CORPUS: $(how_to_make_it "$2")"
  command -v torchrun > /dev/null || refuse "there is no torchrun in the PATH:" \
    "'make setup' installs it, 'source .venv/bin/activate' brings it there"
  TRAIN+=("${PARALLEL[@]}" --corpus "$CORPUS" --seed "$SEED")
  EMBED+=("${PARALLEL[@]}" --corpus "$CORPUS")
  EVALUATE+=("${PARALLEL[@]}" --corpus "$CORPUS")
}

how_to_make_it() {
  if [ "$SIZE" = tiny ]; then
    echo "make quickstart leaves a small one there; or give CORPUS=FOLDER"
  else
    echo "OUTPUT=$CORPUS bash $HERE/data/$1 makes it; or give CORPUS=FOLDER"
  fi
}

# mixture NAME: set WEIGHTS to what --mixture takes, NAME to what the run is called after it. NAME
# is uniform, a path, or what $RUN/4-mixture holds.
mixture() {
  NAME=$(basename "$1" .json)
  case $1 in
    uniform | */* | *.json) WEIGHTS=$1 ;;
    *) WEIGHTS=$RUN/4-mixture/$1.json ;;
  esac
  # The other nodes may be here before the first one has made it; torchrun lets them wait for it.
  [ "$WEIGHTS" = uniform ] || [ -e "$WEIGHTS" ] || [ "$NODE_RANK" != 0 ] ||
    refuse "there is no mixture $WEIGHTS:" "'bash $HERE/pretrain_82m_proxy.sh --help' says how it is made; or give MIXTURE=uniform"
}

# start_from CHECKPOINT: train from its weights.
start_from() {
  [ -d "$1" ] || refuse "there is no run $1 to start from:" \
    "SIZE=$SIZE bash $HERE/pretrain_684m_pile.sh makes one; or give PRETRAINED=FOLDER"
  TRAIN+=(--pretrained-checkpoint "$1")
}

# Set LIMIT to the flag by which a run leaves at STOP_AT, and ENDED to what ends a command then that
# has no such flag and goes on from what it has written; or leave at once if that time is past.
limit_time() {
  LIMIT=() ENDED=()
  [ -n "${STOP_AT:-}" ] || return 0
  local seconds=$((STOP_AT - $(date +%s)))
  ((seconds > 0)) || time_is_up
  LIMIT=(--exit-duration-in-mins "$(printf '%d.%02d' $((seconds / 60)) $((seconds % 60 * 5 / 3)))")
  ENDED=(timeout --foreground "$seconds")
}

time_is_up() {
  echo "the time is up; the same command goes on from here"
  exit
}

# within_limit COMMAND...: end it at STOP_AT, and leave.
within_limit() {
  limit_time
  local status=0
  "${ENDED[@]}" "$@" || status=$?
  [ "$status" = 0 ] || ! is_out_of_time || time_is_up
  return "$status"
}

# Whether STOP_AT has come. A command of ENDED that fails from then on was ended by it, or lost
# ranks of another node that were.
is_out_of_time() { [ -n "${STOP_AT:-}" ] && (($(date +%s) >= STOP_AT)); }
