# shellcheck shell=bash
# The launchers source this file. It converts environment variables to arguments of torchrun and the
# tools.
# Each launcher documents its SIZE, RUN, CORPUS and MIXTURE. All launchers also take the following
# variables (defaults in parentheses):
#   SEED         seed of the initial weights and of the order of samples (1)
#   TP, PP       tensor- and pipeline-parallel size (1, 1)
#   NPROC        ranks per node (one per GPU, or one per core without GPUs)
#   NNODES       number of nodes; start the launcher on each node with its NODE_RANK (set by SLURM)
#                and with the first node's address as MASTER_ADDR (1)
#   STOP_AT      Unix time at which to save and stop; the same command resumes (never)
#   BASE_STEPS   steps of the base models on SlimPajama and the Pile (20000)
#   SETTINGS     authors: the paper's models with Adam's beta2 0.999, dropout 0.1, GPT-2's GELU and
#                no bf16, as in the code on which the paper builds (0.95, 0, exact GELU, bf16)
# Any flag of pretrain_gpt may follow after --. Launchers that train nothing take the flags
# of the tool that they run.
HERE=$(dirname "${BASH_SOURCE[0]}")
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
  refuse "$1: settings are environment variables (see --help); flags follow --"
EXTRA=("${@:2}")

if [ "$SIZE" = tiny ]; then
  CORPUS=${CORPUS:-runs/quickstart/1-corpus}
  if [ "$LAUNCHER" != compare_methods ]; then   # this launcher sets its own
    RUN=${RUN:-runs/tiny/$LAUNCHER}
    PRETRAINED=${PRETRAINED:-runs/tiny/pretrain_684m_pile/5-base/uniform-seed1}
    PROXY=${PROXY:-runs/tiny/pretrain_82m_proxy/2-proxy/tiny-seed1}
  fi
  # Launchers that compute no mixture have no mixture file in the smoke test.
  [[ $LAUNCHER == finetune_* || $LAUNCHER == pretrain_llama_* ]] || MIXTURE=${MIXTURE:-uniform}
  [[ $LAUNCHER != pretrain_llama_* ]] || PROXY_SIZE=${PROXY_SIZE:-tiny}
  NPROC=${NPROC:-2}
  export CUDA_VISIBLE_DEVICES=           # one GPU could not hold two ranks
  export TORCHDYNAMO_DISABLE=1           # do not import TorchInductor: saves a second per process
fi
SEED=${SEED:-1}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
RANKS=(--nproc-per-node "${NPROC:-auto}")
if [ "$NNODES" = 1 ]; then
  RANKS+=(--standalone)
else
  RANKS+=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-port "${MASTER_PORT:-29500}"
    --master-addr "${MASTER_ADDR:?set it to the first of the NNODES nodes}")
fi
PARALLEL=(--tensor-model-parallel-size "${TP:-1}" --pipeline-model-parallel-size "${PP:-1}")
ALONE=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1)   # overrides PARALLEL
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Seconds that a stopped torchrun waits for its ranks to save; the default of 30 may be too short.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}

# shellcheck source=examples/hyperparameters.sh
source "$HERE/hyperparameters.sh"

say() { printf '\n== %s\n' "$*"; }

on_first_node() { [ "$NODE_RANK" != 0 ] || "$@"; }

# choose EXPERIMENT [RECIPE]: set CORPUS and the arrays of flags; examples/data/RECIPE creates the
# corpus. The variable RECIPE, which doge_pile.sh sets, overrides the argument.
choose() {
  CORPUS=${CORPUS:-$RUN/1-corpus}
  hyperparameters "$1" "$SIZE"
  [ -e "$CORPUS/corpus.json" ] || refuse "no corpus at $CORPUS; $(corpus_hint "${RECIPE:-${2:-}}")"
  command -v torchrun > /dev/null || refuse "torchrun is not on the PATH: run 'make setup' and 'source .venv/bin/activate'"
  TRAIN+=("${PARALLEL[@]}" --corpus "$CORPUS" --seed "$SEED")
  EMBED+=("${PARALLEL[@]}" --corpus "$CORPUS")
  EVALUATE+=("${PARALLEL[@]}" --corpus "$CORPUS")
}

corpus_hint() {
  if [ "$SIZE" = tiny ]; then
    echo "create a small one with 'make quickstart', or set CORPUS"
  else
    echo "create it with 'OUTPUT=$CORPUS bash $HERE/data/$1', or set CORPUS"
  fi
}

# mixture NAME: set WEIGHTS, the value of --mixture, and NAME, for the name of the run. The argument
# is uniform, a path, or the name of a file in $RUN/4-mixture.
mixture() {
  NAME=$(basename "$1" .json)
  case $1 in
    uniform | */* | *.json) WEIGHTS=$1 ;;
    *) WEIGHTS=$RUN/4-mixture/$1.json ;;
  esac
  # Other nodes may reach this line before the first node has written the file; torchrun makes them
  # wait.
  [ "$WEIGHTS" = uniform ] || [ -e "$WEIGHTS" ] || [ "$NODE_RANK" != 0 ] ||
    refuse "no mixture at $WEIGHTS; see 'bash $HERE/pretrain_82m_proxy.sh --help', or set MIXTURE=uniform"
}

# start_from CHECKPOINT: start training from the weights of a checkpoint.
start_from() {
  [ -d "$1" ] || refuse "no run at $1; create it with" \
    "'SIZE=$SIZE bash $HERE/pretrain_684m_pile.sh', or set PRETRAINED"
  TRAIN+=(--pretrained-checkpoint "$1")
}

# Set LIMIT to the flag that stops a training run at STOP_AT, and ENDED to the prefix that stops any
# other command at STOP_AT; exit if STOP_AT has passed.
limit_time() {
  LIMIT=() ENDED=()
  [ -n "${STOP_AT:-}" ] || return 0
  local seconds=$((STOP_AT - $(date +%s)))
  ((seconds > 0)) || time_is_up
  LIMIT=(--exit-duration-in-mins "$(printf '%d.%02d' $((seconds / 60)) $((seconds % 60 * 5 / 3)))")
  ENDED=(timeout --foreground "$seconds")
}

time_is_up() {
  echo "STOP_AT has passed; the same command resumes"
  exit
}

# within_limit COMMAND...: run a command; at STOP_AT, stop the command and exit.
within_limit() {
  limit_time
  local status=0
  "${ENDED[@]}" "$@" || status=$?
  [ "$status" = 0 ] || ! is_out_of_time || time_is_up
  return "$status"
}

# Return whether STOP_AT has passed. If so, a command that failed under ENDED was stopped, or ranks
# of the command were stopped on another node.
is_out_of_time() { [ -n "${STOP_AT:-}" ] && (($(date +%s) >= STOP_AT)); }
