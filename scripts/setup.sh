#!/bin/sh
# Everything the checkout needs on a fresh Debian machine: system packages (as root), then .venv from the hashed lock.
# Idempotent, and quick when nothing is to do. Usage: scripts/setup.sh [venv|lab]
set -eu
cd "$(dirname "$0")/.."
what=${1:-venv}
policy=/usr/sbin/policy-rc.d
mark="# specrig setup: no service starts while its packages are installed"

installed() {
    [ "$(dpkg-query -W -f '${Status}' "$1" 2>/dev/null || true)" = "install ok installed" ]
}

allow_starts() {
    if grep -qsxF "$mark" "$policy"; then rm -f "$policy"; fi
}

# The lab has a bridge of its own: what the lxc package would start (lxcbr0, dnsmasq, containers at boot) stays off.
# A machine that has lxc already, or a policy of its own, keeps both as they are.
deny_starts() {
    trap allow_starts EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    [ ! -e "$policy" ] || return 0
    printf '#!/bin/sh\n%s\nexit 101\n' "$mark" >"$policy"
    chmod 755 "$policy"
}

need_packages() {
    missing=""
    for package in "$@"; do
        installed "$package" || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ]; then
        echo "setup: these packages are missing and only root can install them:$missing" >&2
        return 1
    fi
    echo "setup: installing$missing" >&2
    lxc_is_new=""
    case " $missing " in
    *" lxc "*) lxc_is_new=1 ;;
    esac
    [ -z "$lxc_is_new" ] || deny_starts
    apt-get update -qq
    # shellcheck disable=SC2086 # a list of packages
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
    if [ -n "$lxc_is_new" ]; then
        allow_starts
        if command -v systemctl >/dev/null; then
            systemctl -q disable lxc.service lxc-net.service lxc-monitord.service 2>/dev/null || true
        fi
    fi
}

python=""
for candidate in "${PYTHON:-}" /usr/bin/python3 python3 python3.13 python3.12 python3.11; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "setup: Python 3.11 or newer is needed, none was found; install python3 (Debian 12 has 3.11) or set PYTHON" >&2
    exit 1
fi

if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null || need_packages python3-venv
    rm -rf .venv
    "$python" -m venv .venv
fi
want=$(cat requirements.lock pyproject.toml | sha256sum)
if [ "$(cat .venv/.installed 2>/dev/null || true)" != "$want" ]; then
    echo "setup: installing the locked Python packages into .venv" >&2
    .venv/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements.lock
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
    printf '%s\n' "$want" >.venv/.installed
fi

if [ "$what" = lab ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        allow_starts # what a run that was killed left
        need_packages lxc mmdebstrap openssh-client iptables iproute2
    fi
fi
