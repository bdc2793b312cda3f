# shellcheck shell=bash
# All hyperparameters of the launchers, which source this file through launch.sh. Each is marked:
#   paper:    printed in the paper (Chameleon, ICML 2025), in the section or table named here;
#   assumed:  not printed in the paper; the comment names the source;
#   GaLore:   the scripts of GaLore (Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by
#             Gradient Low-Rank Projection");
#   Llama:    the 7B model of Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language
#             Models", the smallest one;
#   tiny:     for SIZE=tiny, a smoke test on two CPU ranks that reproduces nothing.
# Later flags override earlier flags; flags after -- override all others.
# The shapes of the sizes (paper: table of architectures) are in megatron_chameleon/model/config.py.
#
# The paper does not print the steps of its base models of SlimPajama and the Pile. BASE_STEPS sets
# them, but not those of fine-tuning, which are printed; the default, 20,000, is that of the base models in DoGE's code, on which the paper builds
# (10,000 is that of its proxies). The printed GPU hours agree: at the speed of the 82M proxies (0.8
# hours for 1.35e17 FLOPs), the 684M model takes about 16,500 steps in the printed 56 hours. 10,000
# steps in 56 hours are 0.6 times the FLOP/s of the proxies, and 20,000 steps are 1.2 times; larger
# models usually reach more FLOP/s.
#
# SETTINGS=authors trains the paper's models with other settings of DoGE's code: beta2 0.999, dropout
# 0.1, the tanh approximation of GELU, and no bf16.
#
# hyperparameters EXPERIMENT SIZE fills five arrays of flags: TRAIN for pretrain_gpt, EMBED for
# compute_mixture, EVALUATE for evaluate perplexity, and SWEEP_STEPS and SWEEP, in addition to TRAIN
# and EMBED, for sweep_mixture. For the paper's base models and fine-tuning, BUDGET is the number of training tokens.
hyperparameters() {
  local steps=${BASE_STEPS:-20000}
  [[ $steps =~ ^[1-9][0-9]*$ ]] || refuse "BASE_STEPS=$steps: must be a number of steps"
  TRAIN=(
    --weight-decay 0.01        # paper: experimental setup
    --clip-grad 1.0            # paper: experimental setup
    --seq-length 1024          # assumed: from the paper's FLOPs; the baselines' code uses 512
    --lr-warmup-iters 500      # assumed: the baselines' code
    --adam-beta1 0.9           # assumed: usual for language models
    --adam-beta2 0.95          # assumed: usual for language models; DoGE's code: 0.999
    --adam-eps 1e-8            # assumed: the default of Adam
    --micro-batch-size 8       # assumed: limited by GPU memory; does not change results
    --bf16                     # assumed: usual on the paper's H100; DoGE's code: no bf16
  )
  EMBED=(
    --num-windows 4096         # paper: training setup, "4k samples"
    --window-length 512        # assumed: the authors' code
    --recipe reference         # assumed: the authors' code; 'paper' is the text's formulas
  )
  EVALUATE=(
    --split test               # paper: tables of perplexity, "held-out test dataset"
  )
  SWEEP_STEPS=(
    --sweep-steps 1000 2000 5000 10000   # paper: appendix, "Domain weights at different steps"
  )
  SWEEP=(
    --sweep-model 60m 82m 124m 210m       # paper: appendix, the table after that one
    --sweep-ridge 1 10 100                     # paper: the same table as for the sizes
    --sweep-num-windows 2048 4096 8192         # paper: the same table, "2k", "4k" and "8k"
  )

  [ "$1" = huggingface ] || TRAIN+=(--model "$2")   # otherwise the folder determines the model

  case $1 in                   # all experiments use the paper's cosine schedule
    proxy)
      TRAIN+=(
        --train-iters 2000         # paper: training setup
        --global-batch-size 128    # paper: experimental setup
      )
      ;;
    base)
      BUDGET=$((steps * 128 * 1024))
      TRAIN+=(
        --train-iters "$steps"     # assumed: see the top of this file
        --global-batch-size 128    # paper: experimental setup
      )
      ;;
    base-pile)
      BUDGET=$((steps * 512 * 1024))
      TRAIN+=(
        --train-iters "$steps"     # assumed: see the top of this file
        --global-batch-size 512    # paper: experimental setup
      )
      ;;
    finetune)                    # learning rates of pretraining, since the paper states no others
      BUDGET=$((10000 * 128 * 1024))
      TRAIN+=(
        --train-iters 10000        # paper: section on fine-tuning
        --global-batch-size 128    # paper: experimental setup
      )
      ;;
    huggingface)                 # fine-tuning a public model
      TRAIN+=(
        --train-iters 1000         # assumed: a few hours on one GPU
        --lr-warmup-iters 100      # assumed: a tenth of the steps
        --global-batch-size 64     # assumed: usual for fine-tuning
        --micro-batch-size 4       # assumed: limited by GPU memory; does not change results
        --lr 2e-5                  # assumed: usual for fine-tuning all weights
        --min-lr 2e-6              # assumed: a tenth of --lr
        --use-distributed-optimizer   # saves memory; changes no results
      )
      EMBED+=(
        --window-length 1024       # the sequence length of the training
      )
      EVALUATE+=(
        --window-length 1024       # the sequence length of the training
      )
      ;;
    *) refuse "unknown experiment '$1': must be proxy, base, base-pile, finetune or huggingface" ;;
  esac

  case ${SETTINGS:-} in
    '') ;;
    authors)
      [[ $1 != huggingface && $2 != llama-* ]] ||
        refuse "SETTINGS=authors: applies to the paper's models only"
      TRAIN+=(
        --adam-beta2 0.999         # DoGE's code: the default of Hugging Face's trainer
        --hidden-dropout 0.1       # DoGE's code: the default of GPT-2
        --attention-dropout 0.1    # DoGE's code: the default of GPT-2
        --openai-gelu              # DoGE's code: gelu_new, the default of GPT-2
        --no-bf16                  # DoGE's code
      )
      ;;
    *) refuse "SETTINGS=$SETTINGS: must be authors or unset" ;;
  esac

  case $2 in
    60m | 82m | 124m | 210m)
      TRAIN+=(
        --lr 5e-4                  # paper: table of architectures
        --min-lr 1e-4              # paper: table of architectures
      )
      ;;
    684m | 1.2b)
      TRAIN+=(
        --lr 1.5e-4                # paper: table of architectures
        --min-lr 5e-5              # paper: table of architectures
      )
      ;;
    llama-15m | llama-30m)
      TRAIN+=(
        --lr 1e-3                  # assumed: usual for Adam at this size
        --min-lr 1e-4              # assumed: a tenth of --lr
      )
      ;;
    llama-130m | llama-350m)
      TRAIN+=(
        --seq-length 256           # GaLore
        --global-batch-size 512    # GaLore
        --weight-decay 0           # GaLore
        --adam-beta2 0.999         # GaLore: the default of torch
        --micro-batch-size 32      # assumed: limited by GPU memory; does not change results
        --use-distributed-optimizer   # saves memory; changes no results
      )
      ;;&
    llama-130m)
      TRAIN+=(
        --train-iters 20000        # GaLore: 2.6 billion tokens
        --lr-warmup-iters 2000     # GaLore
        --lr 1e-3                  # assumed: usual for Adam at this size
        --min-lr 1e-4              # GaLore: a tenth of --lr
      )
      ;;
    llama-350m)
      TRAIN+=(
        --train-iters 60000        # GaLore: 7.9 billion tokens
        --lr-warmup-iters 6000     # GaLore
        --lr 5e-4                  # assumed: usual for Adam at this size
        --min-lr 5e-5              # GaLore: a tenth of --lr
      )
      ;;
    llama-1b)
      TRAIN+=(
        --seq-length 2048          # Llama
        --global-batch-size 512    # assumed: 1 million tokens; Llama uses 4 million
        --train-iters 24000        # assumed: 25 billion tokens, 20 for each parameter
        --lr-warmup-iters 2000     # Llama
        --lr 3e-4                  # Llama
        --min-lr 3e-5              # Llama: a tenth of --lr
        --weight-decay 0.1         # Llama
        --micro-batch-size 4       # assumed: limited by GPU memory; does not change results
        --use-distributed-optimizer   # saves memory; changes no results
      )
      ;;
    huggingface) ;;
    tiny)
      BUDGET=$((12 * 8 * 64))
      TRAIN+=(
        --lr 1e-2                  # tiny: learns in a few steps
        --min-lr 1e-3              # tiny: a tenth of --lr
        --lr-warmup-iters 2        # tiny: must be smaller than --train-iters
        --train-iters 12           # tiny: seconds
        --seq-length 64            # tiny: seconds
        --global-batch-size 8      # tiny: seconds
        --micro-batch-size 4       # tiny: half of the batch for each of two ranks
        --log-interval 4           # tiny: prints three lines
        --no-bf16                  # tiny: bf16 is slow on CPUs
      )
      if [[ $LAUNCHER == pretrain_llama_* ]]; then
        TRAIN+=(--swiglu --normalization RMSNorm --position-embedding-type rope
          --disable-bias-linear --untie-embeddings-and-output-weights)   # tiny: a Llama
      fi
      EMBED+=(
        --window-length 64         # tiny: seconds
        --num-windows 64           # tiny: seconds
        --bootstrap-resamples 100  # tiny: seconds
      )
      EVALUATE+=(
        --window-length 64         # tiny: seconds
        --max-tokens 2048          # tiny: seconds
      )
      SWEEP_STEPS=(
        --sweep-steps 4 12         # tiny: 12 is the center
      )
      SWEEP+=(
        --sweep-model nano tiny   # tiny: seconds
        --sweep-num-windows 32 64  # tiny: seconds
      )
      ;;
    *) refuse "SIZE=$2: no such size; choose from 60m, 82m, 124m, 210m, 684m, 1.2b, llama-15m," \
      "llama-30m, llama-130m, llama-350m, llama-1b, tiny" ;;
  esac
}
