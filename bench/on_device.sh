#!/usr/bin/env bash
# Tests and measures this checkout on the machine's CUDA device, without network, in at most nine minutes.
#
#   bench/on_device.sh [OUT_DIR [OPTION_OF_BENCH_RUN...]]
#
# Needs python3 with torch, triton, opt_einsum, rich, pytest 8, pytest-xdist and setuptools. Writes
# OUT_DIR/<device>/<date>.json (OUT_DIR: bench/results) with the outcome of every stage. A stage that fails does not
# stop the next; the exit code is then 1.
# To try the script out where there is no such device: bench/on_device.sh results --device cpu --repeats 1
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-bench/results}
bench_options=("${@:2}")
deadline=$((SECONDS + 525))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=()

note() { # NAME OUTCOME SECONDS
  printf '%s\t%s\t%s\n' "$@" >>"$work/stages.tsv"
  printf '== %s: %s, %s s\n' "$@"
}

stage() { # NAME LIMIT_S COMMAND...
  local name=$1 limit=$2 start=$SECONDS outcome=ok left=$((deadline - SECONDS))
  shift 2
  if ((limit > left)); then limit=$left; fi
  if ((limit <= 0)); then
    outcome="no time left"
  else
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$work/$name.log" || outcome="exit code ${PIPESTATUS[0]}"
  fi
  if [[ $outcome == "exit code 124" ]]; then outcome="over $limit s"; fi
  if [[ $outcome != ok ]]; then failed+=("$name ($outcome)"); fi
  note "$name" "$outcome" $((SECONDS - start))
}

python=python3
if python3 -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)'; then
  python3 -m venv --without-pip --system-site-packages "$work/venv"
  python=$work/venv/bin/python
fi

stage install 60 "$python" -m pip install --quiet --no-deps --no-build-isolation --no-index -e .
# Predictions of training and processes that talk by gloo are the same on every machine.
stage tests 240 "$python" -m pytest tests -q -n 8 --dist worksteal -m "not ahead_of_time" \
  --ignore tests/memory --ignore tests/prediction --ignore tests/commands/test_memory.py \
  --ignore tests/pytorch/test_sharding.py
if command -v compute-sanitizer >/dev/null; then
  stage memcheck 80 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool memcheck --error-exitcode 9 "$python" bench/memcheck.py
else
  note memcheck "skipped: compute-sanitizer is not installed" 0
fi
for dtype in float32 bfloat16 float64; do
  stage "bench-$dtype" 90 "$python" bench/run.py --pass both --dtype "$dtype" --json "$work/bench-$dtype.json" \
    ${bench_options[@]+"${bench_options[@]}"}
done

"$python" bench/merge.py "$work" "$out"
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
