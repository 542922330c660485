#!/bin/sh
# The locks: everything (controller and development), what a guest needs, what a host that is its own controller needs, what
# downloads models from a hub, and the newest ansible-core, which wants a newer Python than Debian 12 has. Usage: scripts/lock.sh [a Python >= 3.12]
set -eu
cd "$(dirname "$0")/.."
newer=${1:-python3.12}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tools() { # name, interpreter
    "$2" -m venv "$scratch/$1"
    "$scratch/$1/bin/python" -m pip install -q pip-tools==7.5.2
}
compile_from() { # input, pip-compile's arguments
    from=$1
    shift
    "$scratch/$with/bin/pip-compile" -q --generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
        --strip-extras --allow-unsafe --no-header "$@" "$from"
}
compile() {
    compile_from pyproject.toml "$@"
}
with=oldest
tools oldest "${PYTHON:-python3}"
compile --all-extras -o requirements.lock
compile --extra sim -c requirements.lock -o requirements-guest.lock
compile --extra sim --extra ops --extra report -c requirements.lock -o requirements-host.lock
# What downloads from a hub on a host is no part of the package: an environment of its own with nothing else in it.
"$scratch/oldest/bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["hub"], sep="\n")' \
    >"$scratch/hub.in"
compile_from "$scratch/hub.in" --no-annotate -c requirements.lock -o roles/model_store/files/hub-requirements.txt

if "$newer" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    with=newer
    tools newer "$newer"
    # All but ansible-core itself as in the whole lock.
    grep -v '^ansible-core==' requirements.lock | sed -n 's/^\([a-z0-9._-]*==[^ ]*\).*/\1/p' >"$scratch/same"
    compile --extra sim --extra ops -c "$scratch/same" -o requirements-newest.lock
    sed -i "\|^    #   -c $scratch/|d" requirements-newest.lock
else
    echo "lock: no Python >= 3.12 ($newer), so requirements-newest.lock stays as it is; name one: scripts/lock.sh PYTHON" >&2
fi
