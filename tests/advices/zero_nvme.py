"""The advices of zero_nvme: which tests follow them. tests/advice.py says what the tables mean."""

FOLLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "integration/zero_nvme/test_followed_advice.py": {
        "test_a_slab_is_opened_as_an_error_says": ("weights for {} paths; give one for each",),
        "test_a_slab_with_a_name_is_opened_as_an_error_says": (
            "with, or remove {}.slab* from all of them",
            "leave weights= out and pass block_bytes=",
            "{}); remove {}.slab* there",
            "claim each extent once, before others",
        ),
        "test_a_backend_gets_less_depth_or_is_another": ("name another backend, or lower depth",),
    },
    "unit/test_followed_advice.py": {
        "test_buffers_are_made_contiguous_and_extents_get_room": (
            "numpy.ascontiguousarray(x)",
            "pass a bytearray",
        ),
        "test_a_file_is_created_and_opened_in_the_mode_that_an_error_names": ("mode 'w' creates it",),
    },
    "unit/zero_nvme/test_waits.py": {
        "test_close_and_cancel_of_requests_that_do_not_move_say_so_and_can_be_repeated": (
            "again when the device answers",
        ),
    },
}

EXEMPT: dict[str, str] = {
    "use the version that made it, or a newer one": "there is no other version yet",
    "the aiofiles backend works; reinstall with a compiler": "builds the package anew",
    "# read {}, write {}, both at once": "figures that are printed",
    "MiB x {}: read {}, write {}": "figures that are printed",
    "set /sys/kernel/mm/transparent_hugepage/enabled": "changes the machine for everyone on it",
}
