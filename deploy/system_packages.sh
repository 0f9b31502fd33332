#!/bin/sh
# Distribution packages that pdserve needs and the machine lacks: installed where that is possible (Debian, root), else
# named in one line each. Never fails: pdserve itself falls back, or says what is missing.
set -u

missing=""
python3 -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
command -v g++ >/dev/null || missing="$missing g++"
libraries=$(ldconfig -p 2>/dev/null || /sbin/ldconfig -p 2>/dev/null || true)
for library in libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnuma.so.1:libnuma1; do
  case "$libraries" in
    *"${library%%:*}"*) ;;
    *) missing="$missing ${library##*:}" ;;
  esac
done
for package in "$@"; do
  dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  echo "installing system packages:$missing"
  # shellcheck disable=SC2086  # a list of names
  if apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null; then
    exit 0
  fi
fi
echo "NOT INSTALLED:$missing (no root, no apt-get, or no network). Without g++ pdserve computes with plain PyTorch;" \
  "without libibverbs1, librdmacm1 and libnuma1 it has no Mooncake and moves KV on the same host only."
