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
# The test bed starts a Docker engine of its own where none responds. It installs the Debian packages for that.
if [ "${1:-base}" = cluster ] && ! docker info >/dev/null 2>&1; then
    need apt-get "unpacks a Docker engine of Debian" "use a Debian or Ubuntu machine, or start a Docker engine"
    if [ "$(id -u)" != 0 ]; then
        echo "missing: root (the test bed starts a Docker engine of its own). Run:  sudo make ...   or start a Docker engine" >&2
        missing=1
    fi
fi
exit $missing
