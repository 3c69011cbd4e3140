#!/bin/sh
# Install the clients that are not ours, in the locked versions, into a scratch directory. Runs nobody's install scripts.
# Usage: install.sh [DIRECTORY]; default: $GLOVEBOX_NODE_DIR, else tests/.node. A second run with the same lock is instant.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
there=${1:-${GLOVEBOX_NODE_DIR:-$here/../../.node}}
mkdir -p "$there"
if ! cmp -s "$here/package-lock.json" "$there/installed.json"; then
    cp "$here/package.json" "$here/package-lock.json" "$there/"
    npm ci --prefix "$there" --ignore-scripts --no-audit --no-fund --loglevel=error
    # In front of whatever Node the machine has, which may be older than these clients can use.
    for node in "$there"/node_modules/node-linux-*/bin/node; do
        [ ! -x "$node" ] || ln -sf "$node" "$there/node_modules/.bin/node"
    done
    cp "$here/package-lock.json" "$there/installed.json"
fi
echo "$there"
