#!/bin/sh
# Makes the virtual environment that the Makefile works in: scripts/setup.sh VENV
#
# 1. Debian packages, where they are missing, apt-get exists and we are root: python3-venv, the
#    Vulkan loader, Mesa's drivers (lavapipe is the CPU Vulkan device) and the validation layer.
#    Without root their absence is reported; vkjit then runs on `cpu` and `reference` only.
# 2. VENV, from the first Python that is 3.11 or newer (PYTHON=... chooses another).
# 3. vkjit with its `dev` extra, editable, and nothing else.
set -eu

venv=${1:?usage: scripts/setup.sh VENV}
root=$(cd "$(dirname "$0")/.." && pwd)

say() { echo "setup: $*"; }

find_python() {
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.14 \
        /usr/bin/python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "no Python 3.11 or newer found; install one or set PYTHON=/path/to/python" >&2
    exit 1
}

missing_packages() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    ldconfig -p 2>/dev/null | grep -q 'libvulkan\.so\.1' || echo libvulkan1
    ls /usr/share/vulkan/icd.d/lvp_icd*.json >/dev/null 2>&1 || echo mesa-vulkan-drivers
    [ -e /usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json ] ||
        echo vulkan-validationlayers
}

install_packages() {
    packages=$(missing_packages | tr '\n' ' ')
    [ -n "$packages" ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "missing, and not installed for want of root or apt-get: $packages"
        return 0
    fi
    say "installing Debian packages: $packages"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -q -o DPkg::Lock::Timeout=300 update </dev/null
    # shellcheck disable=SC2086  # one word per package
    apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends $packages </dev/null
}

PATH=$PATH:/usr/sbin:/sbin # ldconfig
python=$(find_python)
install_packages
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
say "$("$venv/bin/python" --version) in $venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root[dev]" \
    </dev/null
