#!/usr/bin/env bash
# On the GPU machine, after the parts were joined and unpacked: installs beside the PyTorch that is there.
# usage: unpack.sh PACK SITE; then put SITE in PYTHONPATH (bench/gpu/run.py does it, given --site)
set -euo pipefail
pack=$1
site=$2
mkdir -p "$site"
tar xf "$pack/vllm.tar.xz" -C "$site"
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$pack"/whl/*.whl
