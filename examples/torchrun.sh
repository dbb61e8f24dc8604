#!/usr/bin/env bash
# Train on several devices of one machine with torchrun.
#
#   examples/torchrun.sh uea/JapaneseVowels                            # 2 devices share each batch
#   DEVICES=4 CONTEXT=4 examples/torchrun.sh lm/wikipedia              # 4 devices share each sequence
#   DEVICES=8 STRATEGY=fsdp OUT=runs/big examples/torchrun.sh lm/wikipedia --trainer.epochs 8
#
# If a process dies, all are started again, up to RESTARTS times, and the run continues from its last checkpoint. The same
# command continues a run that was stopped: SIGTERM saves a checkpoint and ends the processes with code 143.
set -euo pipefail

if [[ $# -eq 0 ]]; then
    echo "usage: examples/torchrun.sh RECIPE [FLAGS of primal train …]" >&2
    exit 2
fi
recipe=$1
shift
devices=${DEVICES:-2}

exec "${PYTHON:-python}" -m torch.distributed.run \
    --standalone --nproc-per-node "$devices" --max-restarts "${RESTARTS:-3}" \
    -m primal_attention train "$recipe" \
    --trainer.devices "$devices" \
    --trainer.strategy "${STRATEGY:-ddp}" \
    --trainer.context "${CONTEXT:-1}" \
    --out "${OUT:-runs/$recipe-torchrun}" --resume \
    "$@"
