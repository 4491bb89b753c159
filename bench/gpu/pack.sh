#!/usr/bin/env bash
# Makes everything that a GPU machine without a package index needs: vLLM 0.26.0 for CUDA 13 (what Hopper uses of it),
# NIXL, the Python packages, Antiphon's wheel, these scripts, and an 8B model's shape with a tokenizer.
#
# usage: bench/gpu/pack.sh DIR TOKENIZER_DIR
#   DIR            gets part-00, part-01, ...; each under 50 MB, so that a small transfer carries it
#   TOKENIZER_DIR  with tokenizer.json, tokenizer_config.json and perhaps chat_template.jinja: vLLM does not start
#                  without them, though all prompts are token ids. Any with at most 49,152 tokens will do.
# On the machine: mkdir PACK; cat part-* | tar xf - -C PACK; PACK/unpack.sh PACK SITE; then PACK/bench/gpu/run.py.
# Needs pip, unzip, xz and an index. Wheels are for x86-64 and Python 3.12; PyTorch 2.11+cu130 is there already.
set -euo pipefail
if [ $# -ne 2 ]; then
  echo "usage: $0 DIR TOKENIZER_DIR" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
out=$1
tokenizer=$2
for file in tokenizer.json tokenizer_config.json; do
  if [ ! -f "$tokenizer/$file" ]; then
    echo "$0: $tokenizer has no $file, without which vLLM does not start" >&2
    exit 2
  fi
done
python=${PYTHON:-python3}
part_bytes=49000000
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/site" "$work/pack/whl" "$work/pack/model-8b" "$work/pack/bench/gpu"

platforms=()
for tag in manylinux_2_35 manylinux_2_34 manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 \
  manylinux2014 manylinux2010 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
fetch() {  # DIR REQUIREMENT
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" -d "$1" "$2"
}

fetch "$work" vllm==0.26.0
# Left out: kernels for other chips, other attention kinds and the Rust front end, which are most of the size.
unzip -q -o "$work"/vllm-*.whl -d "$work/site" -x 'vllm/vllm_flash_attn/_vllm_fa2_C*' 'vllm/vllm-rs' \
  'vllm/third_party/deep_gemm/*' 'vllm/third_party/fmha_sm100/*' 'vllm/entrypoints/serve/instrumentator/static/*' \
  '*/_flashmla*'
tar cf - -C "$work/site" . | xz -T0 -3 > "$work/pack/vllm.tar.xz"
while read -r requirement; do
  case $requirement in '' | '#'*) ;; *) fetch "$work/pack/whl" "$requirement" ;; esac
done < "$here/requirements.txt"
"$python" -m pip wheel -q --no-deps -w "$work/pack/whl" "$here/../.."
cp "$here/model-8b.json" "$work/pack/model-8b/config.json"
cp "$tokenizer"/tokenizer*.json "$work/pack/model-8b/"
[ ! -f "$tokenizer/chat_template.jinja" ] || cp "$tokenizer/chat_template.jinja" "$work/pack/model-8b/"
cp "$here"/*.py "$here"/*.sh "$here"/*.json "$here/requirements.txt" "$work/pack/bench/gpu/"
cp "$here/unpack.sh" "$work/pack/"
rm -f "$out"/part-*
tar cf - -C "$work/pack" . | split -b "$part_bytes" -d - "$out/part-"
(cd "$out" && sha256sum part-* > SHA256SUMS && ls -la)
