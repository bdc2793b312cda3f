#!/usr/bin/env bash
# The 684M model of the Pile, fine-tuned on seven programming languages of the Stack: with uniform
# weights, Chameleon's weights for fine-tuning and those for pretraining, as the paper compares them
# (section "Finetuning", appendix "PPL of finetuning").
#
#   bash examples/finetune_stack.sh
#   PRETRAINED=runs/other bash examples/finetune_stack.sh
#   SIZE=tiny bash examples/finetune_stack.sh      # tries it out on 2 CPU ranks
#   MIXTURE=chameleon-finetune bash examples/finetune_stack.sh -- --micro-batch-size 4
#
# Prints the table of perplexities in the end. The same command goes on with what was interrupted.
#
#   SIZE         model size, that of PRETRAINED (684m)
#   RUN          folder of the experiment (runs/stack)
#   CORPUS       what tools/preprocess_data.py made with the tokenizer of PRETRAINED (RUN/1-corpus)
#   PRETRAINED   the run or checkpoint to start from (runs/pile/5-base/chameleon-pretrain-seed1)
#   MIXTURE      the runs to do ("uniform chameleon-finetune chameleon-pretrain")
set -euo pipefail
SIZE=${SIZE:-684m}
source "$(dirname "$0")/launch.sh"
RUN=${RUN:-runs/stack}
CORPUS=${CORPUS:-$RUN/1-corpus}
PRETRAINED=${PRETRAINED:-runs/pile/5-base/chameleon-pretrain-seed1}
MIXTURE=${MIXTURE:-uniform chameleon-finetune chameleon-pretrain}

choose finetune stack.sh
start_from "$PRETRAINED"

say "Weights from the pretrained model: no proxy is needed"
EMBED+=(--checkpoint "$PRETRAINED" --store "$RUN/3-embeddings")
torchrun "${RANKS[@]}" "$TOOLS/compute_mixture.py" "${EMBED[@]}" --mode finetune \
  --output "$RUN/4-mixture/chameleon-finetune.json"
# The embeddings are there now: the second mode is a matter of algebra, and needs no ranks.
on_first_node python "$TOOLS/compute_mixture.py" "${EMBED[@]}" "${ALONE[@]}" --mode pretrain \
  --output "$RUN/4-mixture/chameleon-pretrain.json"

for choice in $MIXTURE; do
  mixture "$choice"
  limit_time
  say "Fine-tuning, $NAME"
  torchrun "${RANKS[@]}" "$TOOLS/pretrain_gpt.py" "${TRAIN[@]}" "${LIMIT[@]}" \
    --mixture "$WEIGHTS" --run-dir "$RUN/5-base/$NAME-seed$SEED" "${EXTRA[@]}"
  limit_time
  torchrun "${RANKS[@]}" "$TOOLS/evaluate.py" perplexity "${EVALUATE[@]}" \
    --checkpoint "$RUN/5-base/$NAME-seed$SEED" --output "$RUN/6-evaluation/$NAME-seed$SEED.json"
done

say "Comparison"
on_first_node python "$TOOLS/make_report.py" "$RUN"
