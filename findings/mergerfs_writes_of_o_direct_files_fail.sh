#!/usr/bin/env bash
# Every write to a file that was opened with O_DIRECT on mergerfs fails with EINVAL; set by fcntl, O_DIRECT works.
#
# Version: mergerfs 2.33.5 (Debian 12) over ext4, Linux 6.18; as root. unionfs-fuse 1.0 does the same.
# Expected: open(O_DIRECT) fails where a file system cannot do it, or aligned writes work.
# Found: the kernel hands the flag of open() to the daemon, which opens its own file with it, and writes from a buffer
#     that is not aligned. open() succeeds, and each write is EINVAL. fcntl(F_SETFL) is not told to the daemon: the
#     kernel goes past its page cache, and writes work.
# What follows for users of this library: it opens files without the flag and sets it by fcntl, on every file system.
set -euo pipefail
if [ "$(id -u)" != 0 ]; then echo "needs root, for a mount"; exit 1; fi
work=$(mktemp -d)
trap 'umount "$work/mount" || true; rm -rf "$work"' EXIT
(cd "$work" && apt-get download -qq mergerfs=2.33.5-1 && dpkg-deb -x mergerfs_*.deb tools)
mkdir "$work/branch" "$work/mount"
"$work/tools/usr/bin/mergerfs" -o minfreespace=0 "$work/branch" "$work/mount"
python3 - "$work/mount" <<'PYTHON'
import fcntl
import mmap
import os
import sys

page, found = mmap.mmap(-1, 4096), {}
for how in ("open", "fcntl"):
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if how == "open" else 0)
    fd = os.open(f"{sys.argv[1]}/{how}", flags)
    if how == "fcntl":
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    try:
        found[how] = f"{os.pwrite(fd, page, 0)} bytes written"
    except OSError as error:
        found[how] = error.strerror
    os.close(fd)
    print(f"O_DIRECT by {how}: {found[how]}")
assert found == {"open": "Invalid argument", "fcntl": "4096 bytes written"}, "the behaviour has changed"
PYTHON
echo "as described"
