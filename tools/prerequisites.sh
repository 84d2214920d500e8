#!/bin/sh
# Name everything that this machine lacks, one line each, with what to do, and say what works without it.
# $1: base (make demo, make test) | cluster (make test-integration, make test-e2e, make demo-kind)
# It uses nothing but a POSIX shell, and df where there is one, because it runs on machines that lack the rest.
set -u
what=${1:-base}
missing=0
miss() { # miss WHAT REMEDY
    echo "missing: $1. $2" >&2
    missing=1
}
need() { # need COMMAND WHY REMEDY
    command -v "$1" >/dev/null 2>&1 || miss "$1, which $2" "$3"
}
space() { # space GIB FOLDER REMEDY: the folder, or its first parent that exists, must have room
    folder=$2
    while [ ! -d "${folder:-/}" ]; do
        case $folder in */*) folder=${folder%/*} ;; *) folder=. ;; esac
    done
    folder=${folder:-/}
    # The fourth word of the second line of df: the free KiB.
    free=$(df -Pk "$folder" 2>/dev/null | { read -r _ && read -r _ _ _ free _ && echo $((free / 1048576)); })
    [ -z "$free" ] || [ "$free" -ge "$1" ] || miss "$1 GiB of free space in $folder, which has $free GiB" "$3"
}

found=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))' 2>/dev/null) ||
    miss "Python 3.11 or later as python3, found ${found:-none}" \
        "Install it with:  apt-get install python3   (before Debian 12 and Ubuntu 24.04:  uv python install 3.11)"
need bash "the Makefile uses as its shell" "Install it with:  apt-get install bash"
if [ ! -d .venv ]; then
    space 8 "${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/uv}" \
        "torch and the libraries that it requires take most of it. UV_CACHE_DIR names another folder."
fi
base=$missing

# Where no Docker engine answers, the test bed starts one of its own, from Debian's packages.
if [ "$what" = cluster ] && ! docker info >/dev/null 2>&1; then
    need apt-get "unpacks a Docker engine of Debian" "Use a Debian or Ubuntu machine, or start a Docker engine."
    [ "$(id -u)" = 0 ] ||
        miss "root, with which the test bed starts a Docker engine" "Run:  sudo make ...   or start a Docker engine."
    bed=${HOLDFAST_TESTBED_DIR:-${HOME:-}/.cache/holdfast/testbed}
    [ -f "$bed/kubeconfig" ] ||
        space 25 "$bed" "The nodes' images take most of it. HOLDFAST_TESTBED_DIR names another folder."
fi

if [ $missing = 1 ] && [ "$base" = 0 ]; then
    echo "What works all the same: make demo, make test, make quick." >&2
elif [ $missing = 1 ]; then
    echo "Without these nothing but \`make help\` works. Install them, and run make again." >&2
fi
exit $missing
