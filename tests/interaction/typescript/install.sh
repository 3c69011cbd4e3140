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
    # Its package for this machine alone: the other one is a link to it, made by the install script that was not run.
    for claude in "$there"/node_modules/@anthropic-ai/claude-code-linux-*/claude; do
        [ ! -x "$claude" ] || ln -sf "$claude" "$there/node_modules/.bin/claude"
    done
    cp "$here/package-lock.json" "$there/installed.json"
fi
echo "$there"
