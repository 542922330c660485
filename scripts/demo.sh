#!/bin/sh
# The main job, start to end, on the lab: a host is set up, rebooted (and so broken), recovered, benchmarked, reported.
set -eu
cd "$(dirname "$0")/.."
sweep=${1:-quick}
step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

step "the lab: a nested HOST and GUEST with a simulated 8-GPU driver"
specrig lab up
step "provision: from bare to serving"
specrig provision --reason "demo: first set-up"
step "a reboot: device numbers move, the model in RAM is gone, the services are down"
specrig lab reboot
step "recover"
specrig recover --reason "demo: after the reboot"
step "a small sweep: autoregressive against DFlash and DDTree"
specrig bench "sweeps/$sweep.yml" --reason "demo" --yes
step "done"
echo "Look around: . .venv/bin/activate, then specrig lab status, specrig lab shell guest, specrig runs list."
echo "Take it down: specrig lab down, or make clean for everything."
