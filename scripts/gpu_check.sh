#!/usr/bin/env bash
# Checks and measures the engine on this machine's GPU, in under five minutes and without a network.
#
#   scripts/gpu_check.sh WHEEL [FOLDER] [FLAGS OF scripts/gpu_check.py]
#
# WHEEL is servekit's, built anywhere (it is abi3: one file for every Python from 3.11 on). torch is the machine's own.
# FOLDER holds wheels of what else the machine may lack; where there is a network, fill it for Python 3.12 with
#
#   pip download --dest FOLDER --python-version 3.12 --only-binary=:all: --no-deps \
#     msgspec numpy safetensors gguf pyzmq pytest pytest-timeout iniconfig pluggy packaging
#
# Prints what was compared and measured, writes it to gpu_check.json ($OUT/gpu_check.json if OUT is set), runs
# tests/gpu where pytest is there, and ends with another status than 0 if anything is wrong.
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1")
shift
folder=""
if [[ $# -gt 0 && -d $1 ]]; then
  folder=$(realpath "$1")
  shift
fi
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Nothing of the machine's Python is changed, and what it has is used: torch above all.
"$python" -m venv --system-site-packages --without-pip "$work/venv"
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
install() { "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$@"; }
install "$wheel"
for module in msgspec numpy safetensors gguf zmq pytest pytest_timeout iniconfig pluggy packaging; do
  if ! "$work/venv/bin/python" -c "import $module" 2>/dev/null && [[ -n $folder ]]; then
    package=${module/zmq/pyzmq}
    install --find-links "$folder" "${package/_/-}" || echo "$module: not here, and not in $folder"
  fi
done

cd "$here"
"$work/venv/bin/python" scripts/gpu_check.py --out "${OUT:-.}/gpu_check.json" "$@"
if "$work/venv/bin/python" -c 'import pytest, pytest_timeout' 2>/dev/null; then
  "$work/venv/bin/python" -m pytest -q -p no:cacheprovider tests/gpu
else
  echo "pytest is not here: tests/gpu were not run"
fi
