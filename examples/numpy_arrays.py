"""Writes and reads numpy arrays asynchronously by zero-nvme, in any order and without torch.

python examples/numpy_arrays.py [FOLDER]       the folder of a fast disk; else a temporary one
"""

import sys
import tempfile

import numpy as np

import zero_nvme


def main(folder: str) -> None:
    arrays = [np.random.default_rng(seed).standard_normal((512, 1024)) for seed in range(8)]  # 4 MiB each
    with zero_nvme.Slab([folder]) as slab:
        print(f"{slab.backend}: {slab.reason}")
        extents = [slab.allocate(array.nbytes) for array in arrays]
        writes = [slab.write(extent, array) for extent, array in zip(extents, arrays, strict=True)]  # return at once
        zero_nvme.wait_all(writes)  # raises NvmeError with path, offset and reason if one failed

        # Two buffers are enough to read them all: while one is used, the next array is read into the other.
        buffers = [np.frombuffer(zero_nvme.empty(arrays[0].nbytes), dtype=np.float64).reshape(512, 1024) for _ in "ab"]
        read = slab.read(extents[0], buffers[0])
        total = 0.0
        for number in range(len(arrays)):
            read.wait()
            if number + 1 < len(arrays):
                read = slab.read(extents[number + 1], buffers[(number + 1) % 2])
            total += float(buffers[number % 2].sum())
        assert np.isclose(total, sum(array.sum() for array in arrays))

        tail = np.empty(1000)  # the last values of an array; neither this range nor this buffer is aligned
        slab.read(extents[-1], tail, offset=arrays[-1].nbytes - tail.nbytes).wait()
        assert np.array_equal(tail, arrays[-1].flat[-1000:])
        print(f"{len(arrays)} arrays of {arrays[0].nbytes >> 20} MiB came back, through two buffers")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
