#!/usr/bin/env bash
# Tests and measures this checkout on the machine's CUDA device, without installation and network, in nine minutes.
#
#   bench/on_device.sh [OUT_DIR] [--stage NAME]...
#   bench/on_device.sh OUT_DIR --device cpu        try the script out
#   bench/on_device.sh --bring                     before, where git and network are: fill brought/
#
# Needs python3 with torch, triton, opt_einsum, rich, mpmath, pytest 8 and pytest-xdist. OUT_DIR gets at most eight
# files: a log for each stage, and results.json. The exit code is 1 if a stage failed. See also --help.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/device/stages.py" "$@"
