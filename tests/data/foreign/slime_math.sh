#!/bin/bash
# A launch script in the form of slime's, for tests; the figures are made up.
pkill -9 sglang
set -ex
LINKS=$(nvidia-smi topo -m | grep -c NV)
if [ "$LINKS" -gt 0 ]; then FAST=1; else FAST=0; fi
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/some-model.sh"

MODEL_DIR=${MODEL_DIR:-/models}
CKPT_ARGS=(
   --hf-checkpoint ${MODEL_DIR}/Some-MoE
   #--hf-checkpoint ${MODEL_DIR}/Some-MoE-FP8
   --ref-load ${MODEL_DIR}/Some-MoE_torch_dist
   --save /checkpoints/some-moe/
   --save-interval 25
)
ROLLOUT_ARGS=(
   --prompt-data /data/train.jsonl
   --input-key question
   --label-key solution
   --apply-chat-template
   --rm-type math
   --num-rollout 400
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len $((4 * 1024))
   --rollout-temperature 0.9

   --over-sampling-batch-size 48
   --partial-rollout
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --num-steps-per-rollout 2
)
EVAL_ARGS=(
   --eval-interval 10
   --eval-prompt-data Hard /data/hard.jsonl easy /data/easy.jsonl
   --n-samples-per-eval-prompt 4
   --eval-max-response-len 8192
   --eval-top-p 0.7
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
   --expert-model-parallel-size 4
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.001
   --kl-loss-type low_var_kl
   --eps-clip 0.2
   --eps-clip-high 0.28
   --use-tis
   --made-up-option 3
)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.98)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.7)

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="{\"env_vars\": {\"FAST\": \"${FAST}\"}}" \
   -- python3 train.py \
   --actor-num-nodes 2 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${EVAL_ARGS[@]} \
   ${PERF_ARGS[@]} ${GRPO_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${SGLANG_ARGS[@]}
