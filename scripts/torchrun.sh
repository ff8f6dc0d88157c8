#!/usr/bin/env bash
# One network on several GPUs (or CPU processes) of one machine. Everything after the script's name goes to `bame train`:
#
#   scripts/torchrun.sh experiment=imagenet_resnet50 sparsity=1:16 amp=bfloat16 channels_last=true
#   RANKS=2 scripts/torchrun.sh device=cpu            # two processes without a GPU, over gloo
#
# recipe.batch_size is the batch of one optimizer step, over all ranks: the same command gives the same training on any
# number of them. torchrun picks a free port by itself on one machine, so two of these run side by side.
set -euo pipefail
RANKS=${RANKS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
exec torchrun --nproc-per-node="$RANKS" -m bame_cli train "$@"
