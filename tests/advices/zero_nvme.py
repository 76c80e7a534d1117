"""The advices of zero_nvme: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

_HERE = "integration/zero_nvme/test_followed_advice.py::"

FOLLOWED: dict[str, str] = {
    "weights for {} paths; give one for each": _HERE + "test_a_slab_is_opened_as_an_error_says",
    "choose auto or one of": _HERE + "test_a_slab_is_opened_as_an_error_says",
    "name a folder on a disk, or pass allow_memory": _HERE + "test_a_slab_is_opened_as_an_error_says",
    "end that one first, or choose another name": _HERE + "test_a_slab_with_a_name_is_opened_as_an_error_says",
    "with, or remove {}.slab* from all of them": _HERE + "test_a_slab_with_a_name_is_opened_as_an_error_says",
    "give all of them, in their order": _HERE + "test_a_slab_with_a_name_is_opened_as_an_error_says",
    "leave weights= out and pass block_bytes=": _HERE + "test_a_slab_with_a_name_is_opened_as_an_error_says",
    "{}); remove {}.slab* there": _HERE + "test_a_slab_with_a_name_is_opened_as_an_error_says",
    "claim each extent once, before others": _HERE + "test_a_slab_with_a_name_is_opened_as_an_error_says",
    "leave backend and direct out": _HERE + "test_backends_that_do_not_work_are_left_out",
    "cannot do O_DIRECT; leave direct out": _HERE + "test_backends_that_do_not_work_are_left_out",
    "copy it to CPU memory first": _HERE + "test_requests_have_memory_and_are_waited_for",
    "wait() for it first": _HERE + "test_requests_have_memory_and_are_waited_for",
    "name another path, or keep less on NVMe": _HERE + "test_a_path_without_room_is_another_path_or_has_less",
    "mode={} does not exist; choose one of": _HERE + "test_a_file_is_opened_in_a_mode_that_there_is",
    "open another one here, or start children": _HERE + "test_a_child_opens_its_own_slab",
    "is memory; name a folder on a disk": _HERE + "test_a_folder_in_memory_is_changed_for_one_on_a_disk",
    "name another backend, or lower depth": _HERE + "test_a_backend_gets_less_depth_or_is_another",
    "reserve() more, or free extents first": _HERE + "test_a_slab_without_room_reserves_more_or_frees_an_extent",
    "again when the device answers": "unit/zero_nvme/test_waits.py::"
    "test_close_and_cancel_of_requests_that_do_not_move_say_so_and_can_be_repeated",
    "numpy.ascontiguousarray(x)": "test_buffers_are_made_contiguous_and_extents_get_room",
    "pass tensor.contiguous()": "test_buffers_are_made_contiguous_and_extents_get_room",
    "pass a bytearray": "test_buffers_are_made_contiguous_and_extents_get_room",
    "mode 'w' creates it": "test_a_file_is_created_and_opened_in_the_mode_that_an_error_names",
    "open it with 'r+' to write": "test_a_file_is_created_and_opened_in_the_mode_that_an_error_names",
}

EXEMPT: dict[str, str] = {
    "use the version that made it, or a newer one": "there is no other version yet",
    "the aiofiles backend works; reinstall with a compiler": "builds the package anew",
    "# read {}, write {}, both at once": "figures that are printed",
    "MiB x {}: read {}, write {}": "figures that are printed",
    "set /sys/kernel/mm/transparent_hugepage/enabled": "changes the machine for everyone on it",
}
