#!/bin/sh
# Runs a program on lavapipe of Mesa 26.1 or newer, which has cooperative matrices in software.
#
#     scripts/mesa26.sh                      only unpacks it
#     scripts/mesa26.sh PROGRAM [ARG ...]    runs PROGRAM with this driver as the only one
#
# Nothing is installed: the packages of Debian's trixie-backports, and the C library that they need,
# are unpacked into VKJIT_MESA26, by default ${XDG_CACHE_HOME:-~/.cache}/vkjit/mesa26, and PROGRAM
# runs under the loader of that C library. apt downloads them with a state of its own and refuses
# what Debian's archive keys have not signed. Works on Debian 12 and 13, amd64; needs no root.
# Exit status 3: the driver cannot be had here (another system, no network); 4: PROGRAM is missing.
set -eu

root=${VKJIT_MESA26:-${XDG_CACHE_HOME:-$HOME/.cache}/vkjit/mesa26}
suite=trixie-backports
keys=/usr/share/keyrings/debian-archive-keyring.gpg
wanted="mesa-vulkan-drivers libvulkan1 libc6 libstdc++6 libgcc-s1 zlib1g libffi8 libssl3t64"

give_up() {
    echo "mesa26: $1" >&2
    exit 3
}

# The Debian mirror that this system uses, from either format of apt's sources.
mirror() {
    cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
        grep -v '^[[:space:]]*#' |
        grep -oE '(https?|mirror\+file):[^ ]*/debian/?( |$)' |
        sed -E 's#/? *$##' | head -n 1
}

fetch() {
    state=$1/apt
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
    : >"$state/status"
    from=$(mirror)
    for name in trixie "$suite"; do
        echo "deb [arch=amd64 signed-by=$keys] ${from:-http://deb.debian.org/debian} $name main"
    done >"$state/sources.list"
    run_apt() {
        apt-get -qq -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=- \
            -o Dir::State::lists="$state/lists" -o Dir::State::status="$state/status" \
            -o Dir::Cache="$state/cache" -o APT::Architecture=amd64 -o APT::Sandbox::User=root \
            -o APT::Get::List-Cleanup=0 -o Acquire::Languages=none -o Acquire::Retries=2 "$@"
    }
    run_apt update >"$state/log" 2>&1 || give_up "apt could not read $suite: $(tail -n 1 "$state/log")"
    # shellcheck disable=SC2086  # a list of words
    run_apt -y --no-install-recommends --download-only -t "$suite" install $wanted \
        >"$state/log" 2>&1 || give_up "apt could not download: $(tail -n 1 "$state/log")"
    for package in "$state"/cache/archives/*.deb; do
        dpkg -x "$package" "$1"
    done
    rm -rf "$state"
}

unpack() {
    [ "$(uname -m)" = x86_64 ] || give_up "no packages for $(uname -m)"
    for tool in apt-get dpkg; do
        command -v "$tool" >/dev/null || give_up "needs $tool"
    done
    [ -r "$keys" ] || give_up "needs $keys (package debian-archive-keyring)"
    mkdir -p "$(dirname "$root")"
    # Made elsewhere and moved into place: a second run never sees half of it.
    part=$(mktemp -d "$root.XXXXXX")
    trap 'rm -rf "$part"' EXIT
    fetch "$part"
    rm -rf "$root"
    mv "$part" "$root"
    trap - EXIT
}

library=$root/usr/lib/x86_64-linux-gnu
[ -e "$library/libvulkan_lvp.so" ] || unpack
[ $# -gt 0 ] || exit 0

program=$(command -v "$1") || { echo "mesa26: no program $1" >&2; exit 4; }
shift
printf '{"file_format_version": "1.0.1", "ICD": {"library_path": "%s", "api_version": "1.4.0"}}\n' \
    "$library/libvulkan_lvp.so" >"$root/icd.json.$$"
mv "$root/icd.json.$$" "$root/icd.json"
VK_DRIVER_FILES=$root/icd.json
VK_ICD_FILENAMES=$VK_DRIVER_FILES # the same, for loaders before 1.3.207
export VK_DRIVER_FILES VK_ICD_FILENAMES
system=/usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu
exec "$library/ld-linux-x86-64.so.2" \
    --library-path "$library:$library/blas:$system:${LD_LIBRARY_PATH:-}" "$program" "$@"
