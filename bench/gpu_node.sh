#!/usr/bin/env bash
# Unpacks the archives of bench/gpu_kit.py on a GPU node, and runs the drill (bench/gpu.py).
#
#   bash gpu_node.sh KIT WORK OUT [options of bench/gpu.py]
#
# KIT has the archives. An archive that WORK does not have yet is unpacked to WORK. OUT gets the results and logs.
# The node's `python3` runs the drill; PYTHON names another interpreter.
set -euo pipefail
kit=$(realpath "$1") work=$2 out=$3
shift 3
mkdir -p "$work/site" "$work/tree" "$work/te" "$out"
work=$(realpath "$work") out=$(realpath "$out") python=${PYTHON:-python3}

declare -A unpacking
for part in trainer engine tree te; do
  target=$work/site
  case $part in tree | te) target=$work/$part ;; esac
  if compgen -G "$kit/$part.tar.xz*" >/dev/null && [ ! -e "$work/$part.unpacked" ]; then
    # An archive, or its pieces in the order of their names.
    (cat "$kit/$part".tar.xz* | tar -xJf - -C "$target" && touch "$work/$part.unpacked") &
    unpacking[$part]=$!
  fi
done
for part in "${!unpacking[@]}"; do
  wait "${unpacking[$part]}" || { echo "$kit/$part.tar.xz*: tar failed; expected an xz archive, or its pieces" >&2; exit 1; }
done

# With a .pth file instead of PYTHONPATH, processes with their own environment also find the packages and entry points.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
printf '%s\n%s\n' "$work/site" "$work/tree" >"$packages/rlsys_kit.pth"

export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# SGLang compiles kernels at their first use. On some nodes torch guesses a CUDA_HOME without a compiler.
CUDA_HOME=${CUDA_HOME:-$(find /usr/local -maxdepth 1 -name 'cuda*' -exec test -x '{}/bin/nvcc' ';' -print -quit)}
export CUDA_HOME SGLANG_JIT_CACHE_DIR=$work/jit TRITON_CACHE_DIR=$work/triton
# SGLang's compiled prefix tree needs another torch, and its version check rejects the kit's kernel package.
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1

transformer_engine=()
if [ -e "$work/te.unpacked" ]; then
  transformer_engine=(--transformer-engine "$work/te")
  # NVRTC compiles Transformer Engine's kernels with the toolkit's headers.
  export NVTE_CUDA_INCLUDE_DIR=${NVTE_CUDA_INCLUDE_DIR:-$CUDA_HOME/include}
fi

cd "$work/tree"
"$python" bench/gpu_kit.py --check-node >/dev/null
exec "$python" bench/gpu.py --out "$out" --attention-backend "${ATTENTION_BACKEND:-triton}" \
  --engine-args "${ENGINE_ARGS:---cuda-graph-backend-prefill disabled}" "${transformer_engine[@]}" "$@"
