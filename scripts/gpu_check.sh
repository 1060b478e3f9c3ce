#!/usr/bin/env bash
# The checks that need an accelerator: the tests marked "device" and three benchmarks, on a GPU and the CPU.
# Installs nothing: Python, JAX with its GPU plugin and the test packages are expected to be there. At most 8 minutes.
#
#   scripts/gpu_check.sh                          on gpu:0,cpu:0
#   DEVICES=gpu:0,gpu:1 scripts/gpu_check.sh      on others
#   PYTHON=python3.12 scripts/gpu_check.sh        with another interpreter
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
DEVICES=${DEVICES:-gpu:0,cpu:0}
export PYTHONPATH="$PWD:$PWD/examples${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
export AIOPIPE_TEST_DEVICES=$DEVICES
# By default JAX takes most of the GPU's memory at once, also from the next process on it.
export XLA_PYTHON_CLIENT_PREALLOCATE=${XLA_PYTHON_CLIENT_PREALLOCATE:-false}

summary=()
failed=0

check() {  # name, seconds it may take, command
    local name=$1 limit=$2 code=0 start=$SECONDS
    shift 2
    echo "== $name (at most $limit s)"
    timeout --kill-after=5 "$limit" "$@" || code=$?
    case $code in
        0) summary+=("pass  $name ($((SECONDS - start)) s)") ;;
        124 | 137) summary+=("FAIL  $name: not finished after $limit s"); failed=1 ;;
        *) summary+=("FAIL  $name: exit status $code ($((SECONDS - start)) s)"); failed=1 ;;
    esac
}

check "environment" 60 "$PYTHON" -c '
import importlib.metadata as metadata, platform, sys
wanted = ("jax", "jaxlib", "numpy", "anyio", "pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
missing = []
for name in wanted:
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        missing.append(name)
print("python", platform.python_version())
if missing:
    sys.exit("missing, install them or put them on PYTHONPATH: " + " ".join(missing))
import jax
print("devices", jax.devices(), jax.devices("cpu")[:1])
'
if [ "$failed" = 0 ]; then
    check "tests" 180 "$PYTHON" -m pytest tests -m device -q -p no:cacheprovider
    for name in overhead throughput loop_lag; do
        check "benchmarks/$name.py" 75 "$PYTHON" "benchmarks/$name.py" --devices "$DEVICES"
    done
fi

echo "== summary for $DEVICES"
printf '%s\n' "${summary[@]}"
exit "$failed"
