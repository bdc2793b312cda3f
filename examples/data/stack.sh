#!/usr/bin/env bash
# Prepare the Stack without near duplicates: seven programming languages, one domain per language.
#
# Data: bigcode/the-stack-dedup on the Hugging Face hub; parquet in data/<language>/, the text
# in `content`. The data set is gated: accept the terms on its page, then run `hf auth login`. It has
# no validation and test splits; --split samples them. Download the data set first:
#   for language in python java c c++ go ruby php; do
#     hf download bigcode/the-stack-dedup --repo-type dataset --include "data/$language/*" \
#       --local-dir data/the-stack-dedup
#   done
#   TOKENIZER=tokenizer.json bash examples/data/stack.sh
# Other languages in the folder are skipped; INPUT=hf:bigcode/the-stack-dedup streams the seven. On
# n machines that share INPUT and OUTPUT, set SHARD=1/n ... SHARD=n/n; then run once without SHARD.
set -euo pipefail

INPUT=${INPUT:-data/the-stack-dedup}   # the folder that holds data/<language>
OUTPUT=${OUTPUT:-corpora/stack}        # output corpus
TOKENIZER=${TOKENIZER:-tokenizer.json} # --tokenizer-model of preprocess_data
WORKERS=${WORKERS:-}                   # processes; default: one fewer than cores
SHARD=${SHARD:-}                       # i/n: machine i of n

NAMES=(python=python java=java c=c "c++=cpp" go=go ruby=ruby php=php "*=")

python -m megatron_chameleon preprocess_data --input "$INPUT" --output "$OUTPUT" \
  --tokenizer-model "$TOKENIZER" --text-key content --domain-from-path 'data/([^/]+)/[^/]+$' \
  --rename-domain "${NAMES[@]}" ${WORKERS:+--workers "$WORKERS"} ${SHARD:+--shard "$SHARD"} "$@"
