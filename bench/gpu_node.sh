#!/usr/bin/env bash
# Unpacks the archives of bench/gpu_kit.py on a GPU node and runs the drill there (bench/gpu.py).
#
#   bash gpu_node.sh KIT WORK OUT [options of bench/gpu.py]
#
# KIT has the archives, WORK gets what they hold (again only when it is not there), OUT the results and logs.
# The node's `python3` runs everything; PYTHON names another one.
set -euo pipefail
kit=$(realpath "$1") work=$2 out=$3
shift 3
mkdir -p "$work/site" "$work/tree" "$out"
work=$(realpath "$work") out=$(realpath "$out") python=${PYTHON:-python3}

for part in trainer engine tree; do
  target=$work/site
  [ $part = tree ] && target=$work/tree
  if [ -e "$kit/$part.tar.xz" ] && [ ! -e "$work/$part.unpacked" ]; then
    (tar -xJf "$kit/$part.tar.xz" -C "$target" && touch "$work/$part.unpacked") &
  fi
done
wait

# A .pth file, and not PYTHONPATH: entry points of the packages are found, also by processes with an environment of
# their own.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
printf '%s\n%s\n' "$work/site" "$work/tree" >"$packages/rlsys_kit.pth"

export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# SGLang compiles kernels at their first use. torch guesses a CUDA_HOME that has no compiler on some nodes.
CUDA_HOME=${CUDA_HOME:-$(find /usr/local -maxdepth 1 -name 'cuda*' -exec test -x '{}/bin/nvcc' ';' -print -quit)}
export CUDA_HOME SGLANG_JIT_CACHE_DIR=$work/jit TRITON_CACHE_DIR=$work/triton
# Its compiled prefix tree is of another torch, and its version check does not know the smaller kernel package.
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1

cd "$work/tree"
exec "$python" bench/gpu.py --out "$out" --attention-backend "${ATTENTION_BACKEND:-triton}" \
  --engine-args "${ENGINE_ARGS:---cuda-graph-backend-prefill disabled}" "$@"
