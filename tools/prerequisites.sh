#!/bin/sh
# Names each missing prerequisite with the command that installs it. $1: base | cluster
set -u
missing=0
need() { # need COMMAND WHY INSTALL
    command -v "$1" >/dev/null 2>&1 && return
    echo "missing: $1 ($2). Install it with:  $3" >&2
    missing=1
}
if ! command -v python3 >/dev/null 2>&1 || ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "missing: Python >= 3.11. Install it with:  apt-get install python3   (or: uv python install 3.11)" >&2
    missing=1
fi
if [ "${1:-base}" = cluster ]; then
    if ! docker info >/dev/null 2>&1; then # no engine: the test bed builds its own
        need go "builds Kubernetes for the test bed" "apt-get install golang-go   (>= 1.26, or a release of go.dev)"
        need gcc "builds runc for the test bed" "apt-get install gcc libc6-dev"
        need dpkg-deb "unpacks a Docker engine" "use a Debian or Ubuntu machine, or start a Docker engine"
        if [ "$(id -u)" != 0 ]; then
            echo "missing: root (the test bed starts a Docker engine of its own). Run:  sudo make ...   or start a Docker engine" >&2
            missing=1
        fi
    fi
fi
exit $missing
