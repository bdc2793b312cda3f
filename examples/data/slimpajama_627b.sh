#!/usr/bin/env bash
# Prepare the whole SlimPajama-627B: 7 domains with their own validation and test text.
#
# Data: cerebras/SlimPajama-627B on the Hugging Face hub; 59,166 files of JSON lines
# (.jsonl.zst, 895 GB) in train/chunk*/, validation/chunk*/ and test/chunk*/, with the text in `text`
# and the domain in `meta.redpajama_set_name`. Download the data first, since they are too
# large to be streamed more than once:
#   hf download cerebras/SlimPajama-627B --repo-type dataset --local-dir data/slimpajama-627b
#   TOKENIZER=tokenizer.json bash examples/data/slimpajama_627b.sh
# On n machines that share INPUT and OUTPUT, set SHARD=1/n ... SHARD=n/n; then run once without
# SHARD.
set -euo pipefail

INPUT=${INPUT:-data/slimpajama-627b}      # the folder that holds train, validation and test
OUTPUT=${OUTPUT:-corpora/slimpajama-627b} # output corpus
TOKENIZER=${TOKENIZER:-tokenizer.json}    # --tokenizer-model of preprocess_data
WORKERS=${WORKERS:-}                      # processes; default: one fewer than cores
SHARD=${SHARD:-}                          # i/n: machine i of n

NAMES=(RedPajamaArXiv=arxiv RedPajamaBook=book RedPajamaCommonCrawl=cc RedPajamaC4=c4
  RedPajamaGithub=github RedPajamaStackExchange=stackexchange RedPajamaWikipedia=wikipedia)

python -m megatron_chameleon preprocess_data --input "$INPUT/train" \
  --valid-input "$INPUT/validation" --test-input "$INPUT/test" --output "$OUTPUT" \
  --tokenizer-model "$TOKENIZER" --domain-key meta.redpajama_set_name \
  --rename-domain "${NAMES[@]}" ${WORKERS:+--workers "$WORKERS"} ${SHARD:+--shard "$SHARD"} "$@"
