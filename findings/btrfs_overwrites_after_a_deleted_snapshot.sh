#!/usr/bin/env bash
# A file of btrfs with chattr +C is copied once more on write after a snapshot, also when the snapshot was deleted before.
#
# Version: Linux 6.18, btrfs-progs 6.2 (Debian 12); as root, with a loop device.
# Expected: chattr +C makes btrfs overwrite a file in place. While a snapshot shares its extents, the first write copies
#     them. When the snapshot is deleted, nothing is shared (FIEMAP says so), and writes are in place again.
# Found: the first write after the deletion copies every extent that is older than the snapshot, and needs as much free
#     room as the file has bytes. The writes after that are in place again.
# What follows for users of this library: a slab of which there was a snapshot may need its room once more when its run
#     goes on, and reserve() cannot tell. On a full disk the run stops with ENOSPC; make room, and start it again.
set -euo pipefail
if [ "$(id -u)" != 0 ]; then echo "needs root, for a loop device"; exit 1; fi
work=$(mktemp -d)
trap 'cd /; umount "$work/disk" || true; rm -rf "$work"' EXIT
(cd "$work" && apt-get download -qq btrfs-progs=6.2-1+deb12u2 liblzo2-2=2.10-2 && for each in *.deb; do dpkg-deb -x "$each" tools; done)
export PATH="$work/tools/bin:$PATH" LD_LIBRARY_PATH="$work/tools/lib/x86_64-linux-gnu:$work/tools/usr/lib/x86_64-linux-gnu"
truncate -s 128M "$work/image"
mkfs.btrfs -q -f "$work/image" > "$work/said"
mkdir "$work/disk"
mount -o loop "$work/image" "$work/disk"
cd "$work/disk"
btrfs -q subvolume create now
touch now/file
chattr +C now/file
overwrite() { dd if=/dev/urandom of=now/file bs=1M count=16 conv=notrunc status=none; sync; }
places() { filefrag -v now/file | awk '$1 ~ /^[0-9]+:$/ {print $4 $5}' | tr '\n' ' '; }
overwrite; first=$(places)
overwrite; second=$(places)
btrfs -q subvolume snapshot now then
btrfs -q subvolume delete -C then
btrfs -q subvolume sync .
shared=$(filefrag -v now/file | grep -c shared || true)
overwrite; third=$(places)
overwrite; fourth=$(places)
echo "written: $first, overwritten: $second"
echo "after a snapshot was deleted: $shared extents are shared; overwritten: $third, once more: $fourth"
[ "$first" = "$second" ] && [ "$shared" = 0 ] && [ "$second" != "$third" ] && [ "$third" = "$fourth" ] || {
    echo "the behaviour has changed"; exit 1; }
echo "as described"
