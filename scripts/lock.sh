#!/bin/sh
# The three locks: everything (controller and development), what a guest needs, what a host that is its own controller needs.
set -eu
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install -q pip-tools==7.5.2
compile() {
    "$scratch/venv/bin/pip-compile" -q --generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
        --strip-extras --allow-unsafe --no-header "$@" pyproject.toml
}
compile --all-extras -o requirements.lock
compile --extra sim -c requirements.lock -o requirements-guest.lock
compile --extra sim --extra ops --extra report -c requirements.lock -o requirements-host.lock
