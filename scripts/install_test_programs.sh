#!/usr/bin/env bash
# Install the programs that tests can use and pip does not bring: PostgreSQL, Node, Chromium, Redis,
# bubblewrap and shellcheck.
# On Debian or Ubuntu, as root; elsewhere it does nothing. What is not there in the end is skipped by the tests.
set -euo pipefail

[[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || exit 0

install() {
  apt-get update -qq && apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || install postgresql
{ command -v node && command -v npm; } >/dev/null || install nodejs npm ||
  echo "Node cannot be installed: its clients are not run"
[[ -x /usr/bin/chromium ]] || install chromium || echo "Chromium cannot be installed: the page's tests are skipped"
command -v redis-server >/dev/null || install redis-server ||
  echo "Redis cannot be installed: the tests of examples/own_store are skipped"
command -v bwrap >/dev/null || install bubblewrap ||
  echo "bubblewrap cannot be installed: the tests of sandboxes are skipped"
command -v shellcheck >/dev/null || install shellcheck ||
  echo "shellcheck cannot be installed: scripts are only checked by bash -n"
