#!/usr/bin/env bash
# Install what the recipe needs into the environment that is active: this package with its extras demo and verl, which
# trains on GPUs, and the agent with its packages of Node.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"

python -m pip install --requirement requirements.txt --editable '../../../..[demo,verl]'
cd ..
npm ci --ignore-scripts --no-audit --no-fund
npm run build
