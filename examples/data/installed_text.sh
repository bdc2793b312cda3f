#!/usr/bin/env bash
# Real text without a download: what the installed packages bring, in 8 domains, as the quickstart
# has it. In half a minute; a machine with other packages has other text.
#   OUTPUT=corpora/installed-text bash examples/data/installed_text.sh
set -euo pipefail

OUTPUT=${OUTPUT:-corpora/installed-text}              # the corpus is written here
INPUT=${INPUT:-$(dirname "$OUTPUT")/text}             # the text, gathered if it is not there
TOKENIZER=${TOKENIZER:-$(dirname "$OUTPUT")/tokenizer.json}   # trained if it is not there
TOOLS=$(dirname "$0")/../../tools

[ -e "$INPUT/gathered.json" ] ||
  python "$TOOLS/gather_installed_text.py" --output-dir "$INPUT" --max-bytes-per-domain 3500000
DOMAINS=()
for file in "$INPUT"/*.jsonl; do
  name=${file##*/}
  DOMAINS+=(--input "${name%.jsonl}=$file")
done
[ -e "$TOKENIZER" ] ||
  python "$TOOLS/train_tokenizer.py" "${DOMAINS[@]}" --output "$TOKENIZER" --vocab-size 8192
python "$TOOLS/preprocess_data.py" "${DOMAINS[@]}" --output "$OUTPUT" \
  --tokenizer-model "$TOKENIZER" --split 80,10,10 --min-tokens-per-split 20000 "$@"
