#!/usr/bin/env bash
# make test-fresh: the suite on a bare Debian (python3, make, certificates, nothing else), as a user without a passwd
# entry, a group or a capability. TESTS= picks some; FRESH_UID=0 runs it as root; FRESH_KEEP=1 keeps the environment
# that the last run installed; FRESH_ROOT= is where the roots lie; FRESH_MIRROR= is a Debian mirror other than the usual.
# FRESH_SUITE= is the release: bookworm has Python 3.11, trixie 3.13.
#
# The root has its own mounts, processes and IPC, but this machine's network: packages are fetched as `make test` does,
# by the PIP_* and UV_* variables given here. Nothing is left in its /tmp and /var/tmp, or the run fails; in /dev/shm an
# engine that a test kills leaves shared memory of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

SUITE=${FRESH_SUITE:-bookworm} PACKAGES=python3,python3-venv,make,ca-certificates
uid=${FRESH_UID:-23456} folder=${FRESH_ROOT:-$PWD/.cache/fresh}
root=$folder/$SUITE home=$root/srv/user

missing=()
for tool in debootstrap:debootstrap unshare:util-linux pivot_root:util-linux setpriv:util-linux git:git; do
  PATH=$PATH:/usr/sbin:/sbin command -v "${tool%:*}" >/dev/null || missing+=("${tool%:*} (apt-get install ${tool#*:})")
done
if ((${#missing[@]})); then
  printf 'make test-fresh needs %s\n' "${missing[@]}" >&2
  exit 2
fi
if [ "$(id -u)" != 0 ]; then
  echo "make test-fresh makes a root file system and mounts it: run it as root" >&2
  exit 2
fi
unshare --mount --pid --ipc --fork true || { echo "make test-fresh: this root may not unshare mounts and processes" >&2; exit 2; }

if [ ! -e "$root.made" ]; then
  echo "fresh root: $SUITE into $root" >&2
  rm -rf "$root"
  mkdir -p "$folder"
  debootstrap --variant=minbase --include=$PACKAGES $SUITE "$root" ${FRESH_MIRROR:+"$FRESH_MIRROR"} >"$folder/debootstrap.log" ||
    { tail -5 "$folder/debootstrap.log" >&2; exit 2; }
  touch "$root.made"
fi
for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt; do
  cp -L "$file" "$root$file"
done

[ -n "${FRESH_KEEP:-}" ] || rm -rf "$home"
mkdir -p "$home/turnlog"
find "$home/turnlog" -mindepth 1 -maxdepth 1 ! -name .venv ! -name .cache -exec rm -rf {} +
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- --ignore-failed-read |
  tar --extract --directory="$home/turnlog"
chown -R "$uid:$uid" "$home"
for open in tmp var/tmp; do
  find "$root/$open" -mindepth 1 -delete
done

settings=()
while IFS= read -r -d '' variable; do
  case $variable in PIP_* | UV_* | *_proxy=* | *_PROXY=* | SSL_CERT_*) settings+=("$variable") ;; esac
done < <(env -0)

# pivot_root, not chroot: the kernel gives no user namespace, and so no bubblewrap, to a process in a chroot.
enter='
  set -eu
  mount --make-rprivate /
  mount --bind "$1" "$1"
  cd "$1"
  mount --rbind /dev dev
  mount -t tmpfs -o mode=1777 shm dev/shm
  mount --rbind /sys sys
  mount -t proc proc proc
  mkdir -p .old
  pivot_root . .old
  umount -l .old
  cd /srv/user/turnlog
  shift
  "$@" TMPDIR=/srv/user make .venv/.ready
  status=0
  "$@" make test ${TESTS:+TESTS="$TESTS"} || status=$?
  left=$(find /tmp /var/tmp -mindepth 1 -maxdepth 1; find /dev/shm -name "turnlog*")
  [ -z "$left" ] || { printf "left outside the tests'"'"' own folder:\n%s\n" "$left" >&2; exit 1; }
  exit $status
'
user=(setpriv --reuid="$uid" --regid="$uid" --clear-groups)
[ "$uid" = 0 ] || user+=(--inh-caps=-all --bounding-set=-all)
exec unshare --mount --pid --ipc --fork --kill-child bash -c "$enter" fresh "$root" "${user[@]}" \
  env -i HOME=/srv/user PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 "${settings[@]}"
