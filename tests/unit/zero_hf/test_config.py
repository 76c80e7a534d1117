"""What a `ZeroConfig` accepts, and from where."""

import pytest
import torch

from zero_hf import ConfigError, ZeroConfig, shard
from zero_offload import OffloadError


def test_offload_places_what_no_kind_places_itself_and_settings_name_a_class():
    config = ZeroConfig(offload="nvme", gradients="host", nvme_paths=["/a", "/b"])
    assert config.placements == {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"}
    assert config.nvme_paths == ("/a", "/b")
    assert ZeroConfig(row_modules="layers.*", token_modules=["*.mlp"]).token_modules == ("*.mlp",)
    config = ZeroConfig.of({"optimizer": {"device": 0.25, "host": 0.75}})
    assert config.placements["optimizer"] == {"device": 0.25, "host": 0.75}
    assert hash(config) == hash(ZeroConfig(optimizer={"device": 0.25, "host": 0.75}))
    assert hash(ZeroConfig(row_modules="layers.*")) == hash(ZeroConfig(row_modules=["layers.*"]))
    assert ZeroConfig().placements == dict.fromkeys(("parameters", "gradients", "optimizer"), "device")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stage": 4}, "stage=4: choose one of 0, 1, 2, 3"),
        ({"offload": "nvme"}, "nvme_paths is empty"),
        ({"optimizer": "disk"}, "optimizer: 'disk' is not a tier"),
        ({"zero_stage": 3}, "zero_stage, which is no setting: there are stage, offload"),
        (["host"], "a list: give a mapping"),
        ({"param_dtype": "fp8"}, "param_dtype='fp8': choose one of None, 'bf16', 'fp16'"),
        ({"optimizer": {"host": 0.5}}, "add up to 0.5, not to 1"),
        ({"optimizer": {"host": 0.5, "nvme": 0.5}}, "nvme_paths is empty"),
        ({"host_bytes": "4GiB"}, "host_bytes='4GiB': give a whole number of at least 0, without a unit"),
        ({"tile_numel": 0}, "tile_numel=0 is not a multiple of"),
        ({"activations": "disk"}, "'disk' is not an activation policy; policies are keep, recompute, host, nvme"),
        ({"activations": "nvme", "offload": "host"}, "activations='nvme' needs something else on nvme"),
        ({"rows": 4}, "rows=4 with activations='keep': rows needs recomputed blocks"),
        ({"rows": 0, "activations": "host"}, "rows=0: give the number of rows"),
        ({"tokens": 0, "activations": "host"}, "tokens=0: give the number of tokens"),
        ({"nvme_paths": "/mnt/{localrank}"}, "the only placeholder is {local_rank}"),
        ("/nowhere/zero.yaml", "/nowhere/zero.yaml"),
    ],
)
def test_what_is_not_known_is_refused_with_the_values_there_are(given, said):
    net = torch.nn.Linear(4, 1)
    with pytest.raises((ConfigError, OffloadError), match="(?s).*".join(said.split("...")).replace("(", r"\(")):
        shard(net, torch.optim.SGD(net.parameters(), lr=0.1), ZeroConfig.of(given))
