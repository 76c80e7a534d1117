"""The packages whose optimizers `nox -s optimizers` compares with plain torch, and the rate of their steps."""

PACKAGES = {  # module: the distribution and its version, without what it needs
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch_optimizer==4.1.0",
    "torch_optimizer": "torch-optimizer==0.3.0",
    "timm.optim": "timm==1.0.31",
    "optimi": "torch-optimi==0.3.3",
    "lion_pytorch": "lion-pytorch==0.2.5",
    "adan_pytorch": "adan-pytorch==0.1.0",
    "came_pytorch": "came-pytorch==0.1.3",
    "adam_atan2_pytorch": "adam-atan2-pytorch==0.4.1",
    "grams": "grams-pytorch==0.0.2",
    "grokfast_pytorch": "grokfast-pytorch==0.0.11",
    "schedulefree": "schedulefree==1.4.1",
    "prodigyopt": "prodigyopt==1.1.2",
    "dadaptation": "dadaptation==3.2",
    "adabound": "adabound==0.0.5",
    "adamod": "adamod==0.0.3",
    "apollo_torch": "apollo-torch==1.0.3",
    "galore_torch": "galore-torch==1.0",
    "bitsandbytes.optim": "bitsandbytes==0.50.2",
    "torchao.optim": "torchao==0.18.0",
    "heavyball": "heavyball==3.2.1",
}
NEEDS = ("einops", "numpy", "opt-einsum", "pytorch-ranger==0.1.1", "transformers")  # what some of them import
RATE = 0.01

if __name__ == "__main__":  # for the noxfile
    print(*NEEDS)
    print(*(pin for pin in PACKAGES.values() if "==" in pin))
