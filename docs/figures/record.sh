#!/bin/bash
# Records docs/figures/exec.cast, a terminal in which attention.py runs twice, and draws exec.svg from it.
# On PATH: python and fusekit[build] with flash-attn-4 and PyTorch, asciinema (2.4) and termtosvg (of termtosvg-ng 1.4).
set -eu
cd "$(dirname "$0")"
if [ "${1-}" != session ]; then
    FUSEKIT_STORE=$(mktemp -d) && export FUSEKIT_STORE
    trap 'rm -r "$FUSEKIT_STORE"' EXIT
    export CUTE_DSL_ARCH=sm_90a FLASH_ATTENTION_ARCH=sm_90 FLASH_ATTENTION_NUM_SMS=132
    export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=0 PYTHONWARNINGS=ignore TORCH_CPP_LOG_LEVEL=ERROR SHELL=/bin/sh TERM=xterm-256color
    asciinema rec --overwrite --quiet --cols 72 --rows 13 --idle-time-limit 6 -c "bash ${0##*/} session" exec.cast
    termtosvg render exec.cast exec.svg -t gjm8 -D 6000 -m 50 -M 6000
    exit
fi
run() {
    printf '\033[1m$ %s\033[0m\n' "$*"
    sleep 1
    "$@"
    sleep 2
}
run fusekit exec --level 1 -- python attention.py
run fusekit exec --level 1 -- python attention.py
