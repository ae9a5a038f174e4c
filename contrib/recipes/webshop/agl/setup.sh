#!/usr/bin/env bash
# Install the requirements of the recipe into the active environment: this package with the extras demo and verl, which
# trains on GPUs, and the agent with its Node packages.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"

python -m pip install --requirement requirements.txt --editable '../../../..[demo,verl]'
cd ..
npm ci --ignore-scripts --no-audit --no-fund
npm run build
