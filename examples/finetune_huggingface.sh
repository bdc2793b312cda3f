#!/usr/bin/env bash
# Fine-tune a Hugging Face model (GPT-2, Llama, Mistral, Qwen2, Qwen3) on your own domains, with
# uniform weights and with Chameleon's fine-tuning and pretraining weights, and export the results to
# Hugging Face folders. The model itself embeds the domains, so no proxy is trained.
#
#   INPUT="web=text/web code=text/code" bash examples/finetune_huggingface.sh ./SmolLM2-135M
#   CORPUS=corpora/mine bash examples/finetune_huggingface.sh ./SmolLM2-135M
#   SIZE=tiny INPUT="a=a.jsonl b=b.jsonl" bash examples/finetune_huggingface.sh ./SmolLM2-135M
#   MIXTURE=chameleon-finetune INPUT=... bash examples/finetune_huggingface.sh ./Qwen3-0.6B -- --lr 1e-5
#
# The first argument is a folder with config.json, weights in safetensors and the tokenizer. A table
# of perplexities is printed at the end. The same command resumes after an interruption.
#
#   INPUT        domains, "NAME=PATH NAME=PATH": files or folders of text, as for --input of
#                preprocess_data, which tokenizes them with the model's tokenizer
#   CORPUS       instead of INPUT, a corpus made with the model's tokenizer (RUN/1-corpus)
#   RUN          folder of the experiment (runs/finetune-MODEL)
#   MIXTURE      mixtures to fine-tune with ("uniform chameleon-finetune chameleon-pretrain")
#   SIZE         tiny for a smoke test on 2 CPU ranks (huggingface)
set -euo pipefail
MODEL=
case ${1:-} in
  '' | -*) ;;
  *) MODEL=${1%/} && shift ;;
esac
SIZE=${SIZE:-huggingface}
RUN=${RUN:-runs/finetune-$(basename "$MODEL")}
CORPUS=${CORPUS:-$RUN/1-corpus}
source "$(dirname "$0")/launch.sh"
MIXTURE=${MIXTURE:-uniform chameleon-finetune chameleon-pretrain}

[ -n "$MODEL" ] || refuse "no model: pass the folder of a Hugging Face model as the first argument"
[ -e "$MODEL/config.json" ] || refuse "$MODEL has no config.json; pass the folder of a Hugging Face model"
if [ ! -e "$CORPUS/corpus.json" ]; then
  [ -n "${INPUT:-}" ] || refuse "no corpus at $CORPUS; set INPUT='NAME=PATH NAME=PATH', or CORPUS"
  [ "$NNODES" = 1 ] || refuse "no corpus at $CORPUS; create it before a run on several nodes"
  DOMAINS=()
  for domain in $INPUT; do DOMAINS+=(--input "$domain"); done
  say "Corpus, with the tokenizer of $MODEL"
  python -m megatron_chameleon preprocess_data "${DOMAINS[@]}" --tokenizer-model "$MODEL" --output "$CORPUS"
fi

source "$HERE/compare_mixtures.sh"
choose huggingface
TRAIN+=(--pretrained-checkpoint "$MODEL")
EMBED+=("${ALONE[@]}")   # ranks embed a Hugging Face model by data parallelism only
weigh_domains "$MODEL" finetune pretrain
train_and_compare
for choice in $MIXTURE; do
  mixture "$choice"
  say "Export, $NAME"
  on_first_node python -m megatron_chameleon convert_checkpoint to-huggingface --overwrite \
    --checkpoint "$RUN/5-base/$NAME-seed$SEED" --output "$RUN/huggingface/$NAME-seed$SEED"
done
