"""The advices of zero_nvme: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

FOLLOWED: dict[str, str] = {
    "numpy.ascontiguousarray(x)": "test_buffers_are_made_contiguous_and_extents_get_room",
    "pass tensor.contiguous()": "test_buffers_are_made_contiguous_and_extents_get_room",
    "pass a bytearray": "test_buffers_are_made_contiguous_and_extents_get_room",
    "mode 'w' creates it": "test_a_file_is_created_and_opened_in_the_mode_that_an_error_names",
    "open it with 'r+' to write": "test_a_file_is_created_and_opened_in_the_mode_that_an_error_names",
}

EXEMPT: dict[str, str] = {}

NOT_FOLLOWED: dict[str, int] = {
    "zero_nvme/buffers.py": 1,
    "zero_nvme/doctor.py": 2,
    "zero_nvme/errors.py": 2,
    "zero_nvme/extents.py": 1,
    "zero_nvme/file.py": 1,
    "zero_nvme/filesystem.py": 1,
    "zero_nvme/options.py": 1,
    "zero_nvme/probe.py": 2,
    "zero_nvme/slab.py": 2,
    "zero_nvme/ticket.py": 1,
    "zero_nvme/tune.py": 2,
}
