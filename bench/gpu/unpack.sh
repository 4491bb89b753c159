#!/usr/bin/env bash
# On the GPU machine, after the parts were joined and unpacked: installs beside the PyTorch that is there.
# usage: unpack.sh PACK SITE; then PACK/bench/gpu/run.py POINT --site SITE --model PACK/model-8b --out OUT
set -euo pipefail
if [ $# -ne 2 ]; then
  echo "usage: $0 PACK SITE" >&2
  exit 2
fi
pack=$1
site=$2
if [ ! -f "$pack/vllm.tar.xz" ]; then
  echo "$0: $pack has no vllm.tar.xz; join and unpack the parts first: cat part-* | tar xf - -C $pack" >&2
  exit 2
fi
mkdir -p "$site"
tar xf "$pack/vllm.tar.xz" -C "$site"
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$pack"/whl/*.whl
