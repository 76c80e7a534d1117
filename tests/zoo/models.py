"""The models of the zoo, one function each: a small model of a package, and its loss at a step.

The imports stand inside, because a process builds one model. A package is installed without its own requirements, so
`beside` names what its import needs of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Any, int], Tensor]  # of a model, at a step


@dataclass
class Subject:
    """A model and its loss. optimizer: of its parameters, if it is not the zoo's AdamW."""

    model: Any
    loss: Loss
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None


@dataclass(frozen=True)
class Entry:
    """package: "name==version". blocks: names of the classes whose modules are units; "": the library chooses."""

    package: str
    beside: str
    blocks: str
    make: Callable[[], Subject]


ZOO: dict[str, Entry] = {}


def zoo(package: str, beside: str = "", blocks: str = "") -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    def add(make: Callable[[], Subject]) -> Callable[[], Subject]:
        ZOO[make.__name__] = Entry(package, beside, blocks, make)
        return make

    return add


class Assembled(nn.Module):
    """Modules and parameters by name, and `forward`, a function of this module and its inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *given: Any) -> Any:
        return self._forward(self, *given)


def numbers(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def words(step: int, *shape: int, below: int = 32) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(step))


def next_word(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def size(y: Tensor) -> Tensor:
    return (y - 0.5).square().mean()


def of_numbers(*shape: int, out: Callable[[Any], Tensor] = lambda y: y) -> Loss:
    """The size of the model's output for numbers of this shape."""
    return lambda model, step: size(out(model(numbers(step, *shape))))


def of_images(width: int = 32, channels: int = 3) -> Loss:
    return of_numbers(2, channels, width, width)


# -- language


@zoo("mambapy==1.2.0", blocks="ResidualBlock")
def mamba() -> Subject:
    from mambapy.mamba import Mamba, MambaConfig

    return Subject(Mamba(MambaConfig(d_model=16, n_layers=2)), of_numbers(2, 8, 16))


TITANS = "einops einx tensordict assoc-scan rotary-embedding-torch hyper-connections x-transformers "


@zoo("titans-pytorch==0.5.5", TITANS + "axial-positional-embedding x-mlps-pytorch")
def titans_memory() -> Subject:
    from titans_pytorch import NeuralMemory

    return Subject(NeuralMemory(dim=16, chunk_size=4), of_numbers(2, 16, 16, out=lambda y: y[0]))


@zoo("openai-whisper==20250625", "tiktoken tqdm numba more-itertools", blocks="ResidualAttentionBlock")
def whisper() -> Subject:
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(8, 10, 16, 2, 2, 32, 8, 16, 2, 2))
    nn.init.zeros_(model.decoder.positional_embedding)
    return Subject(model, lambda m, step: next_word(m(numbers(step, 2, 8, 20), words(step, 2, 8)), words(step, 2, 8)))


@zoo("sentence-transformers==6.2.0", "transformers scikit-learn scipy tqdm pillow", blocks="BertLayer")
def sentence_bert() -> Subject:
    from sentence_transformers.models import Normalize, Pooling
    from transformers import BertConfig, BertModel

    def forward(m: Any, tokens: Tensor) -> Tensor:
        mask = torch.ones_like(tokens)
        found = {"token_embeddings": m.bert(tokens, attention_mask=mask)[0], "attention_mask": mask}
        return m.normalize(m.pool(found))["sentence_embedding"]

    def loss(m: Any, step: int) -> Tensor:
        return F.cross_entropy(20 * m(words(step, 3, 8)) @ m(words(step, 3, 6)).T, torch.arange(3))

    shape = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = BertModel(BertConfig(intermediate_size=32, **shape))
    return Subject(Assembled(forward, bert=bert, pool=Pooling(16), normalize=Normalize()), loss)


def transformers_model(name: str, loss: Loss | None = None, **config: Any) -> Subject:
    import transformers

    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "attn_implementation": "eager"}
    made = getattr(transformers, name.replace("ForCausalLM", "").replace("Model", "") + "Config")(**shape | config)
    return Subject(
        getattr(transformers, name)(made), loss or (lambda m, step: m(words(step, 2, 8), labels=words(step, 2, 8)).loss)
    )


@zoo("transformers==5.24.0", blocks="BertLayer")
def bert_last_attention() -> Subject:
    """MiniLM's loss, which enters the last block inside."""
    return transformers_model(
        "BertModel", lambda m, step: size(m(words(step, 2, 8), output_attentions=True).attentions[-1])
    )


@zoo("transformers==5.24.0", blocks="MixtralDecoderLayer")
def mixtral_router() -> Subject:
    """A loss of the router's logits alone."""

    def loss(m: Any, step: int) -> Tensor:
        found = m(words(step, 2, 8), labels=words(step, 2, 8), output_router_logits=True)
        return found.aux_loss + size(found.router_logits[-1])

    return transformers_model("MixtralForCausalLM", loss, num_local_experts=4, num_key_value_heads=2)


@zoo("transformers==5.24.0", blocks="LlamaDecoderLayer")
def llama_earlier_cache() -> Subject:
    """A loss through the cache of an earlier forward, and tied embeddings."""

    def loss(m: Any, step: int) -> Tensor:
        first = m(words(step, 2, 4), use_cache=True)
        again = m(words(step + 9, 2, 4), past_key_values=first.past_key_values)
        return next_word(again.logits, words(step, 2, 4))

    return transformers_model("LlamaForCausalLM", loss, tie_word_embeddings=True, num_key_value_heads=2)


@zoo("transformers==5.24.0", blocks="ViTLayer")
def vit_hidden_states() -> Subject:
    def loss(m: Any, step: int) -> Tensor:
        found = m(numbers(step, 2, 3, 16, 16), output_hidden_states=True, output_attentions=True)
        return size(found.hidden_states[1]) + size(found.attentions[0])

    return transformers_model("ViTModel", loss, image_size=16, patch_size=8)


# -- torch's own: ways into a model besides its call


class Layers(nn.Module):
    """Three layers of torch's with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@zoo("torch==2.13.0", blocks="TransformerEncoderLayer")
def hooks_on_inner_modules() -> Subject:
    """The loss is of what forward hooks took inside of the first and the last layer, and not of the output."""

    def loss(m: Any, step: int) -> Tensor:
        taken: list[Tensor] = []
        inside = (m.layers[0].linear1, m.layers[2].norm1)
        handles = [each.register_forward_hook(lambda module, args, y: taken.append(y)) for each in inside]
        m(numbers(step, 2, 5, 4))
        for handle in handles:
            handle.remove()
        return sum(map(size, taken))

    return Subject(Layers(), loss)


@zoo("torch==2.13.0")
def state_of_the_step_before() -> Subject:
    """A recurrent block keeps its state and its outputs, and both are in the next losses."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.kept = nn.GRUCell(4, 8), []
            self.register_buffer("state", torch.zeros(5, 8), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            for part in x:
                self.state = self.cell(part, self.state)
                self.kept.append(self.state)
            return self.state

    model = nn.Sequential(Recurrent(), nn.Linear(8, 2))

    def loss(m: Any, step: int) -> Tensor:
        m[0].state, m[0].kept[:] = m[0].state.detach(), []
        m(numbers(step, 3, 5, 4))
        again = m(numbers(step + 9, 2, 5, 4))
        return size(again) + size(m[0].kept[0]) + size(m[0].kept[2])

    return Subject(model, loss)


@zoo("torch==2.13.0", blocks="TransformerEncoderLayer")
def predictions_between() -> Subject:
    """Predicts before each loss with an average of its parameters, whose sizes and norms it reads."""
    averages: dict[str, Tensor] = {}

    def loss(m: Any, step: int) -> Tensor:
        with torch.no_grad():
            for name, p in m.named_parameters():
                averages[name] = averages.get(name, p.data.clone()).lerp(p.data, 0.3)
            predicted = torch.func.functional_call(m, averages, (numbers(step, 2, 5, 4),))
            sizes = sum(p.data.shape.numel() * p.data.norm() for p in m.parameters())
        return (m(numbers(step, 2, 5, 4)) - predicted).square().mean() * (1 + 1e-4 * sizes)

    return Subject(Layers(), loss)


# -- images


@zoo("timm==1.0.31", "torchvision huggingface_hub safetensors", blocks="LevitBlock")
def levit() -> Subject:
    import timm

    return Subject(timm.create_model("levit_128s", img_size=64, num_classes=4), of_numbers(6, 3, 64, 64))


@zoo("torchvision==0.28.0", "pillow", blocks="_DenseLayer")
def densenet() -> Subject:
    """Checkpointed, dense connections."""
    from torchvision.models import DenseNet

    return Subject(DenseNet(8, (2, 2), 8, num_classes=4, memory_efficient=True), of_images())


@zoo("torchvision==0.28.0", "pillow", blocks="SwinTransformerBlock")
def swin() -> Subject:
    from torchvision.models import SwinTransformer

    return Subject(SwinTransformer([4, 4], 16, [1, 1], [2, 2], [2, 2], num_classes=4), of_images())


@zoo("monai==1.6.1", blocks="UnetBasicBlock UnetUpBlock")
def dynunet() -> Subject:
    from monai.networks.nets import DynUNet

    model = DynUNet(2, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 8], deep_supervision=True, deep_supr_num=1)
    return Subject(model, of_numbers(2, 1, 16, 16))


UNET = "huggingface_hub safetensors regex requests pillow importlib_metadata"


@zoo("diffusers==0.42.1", UNET, blocks="ResnetBlock2D BasicTransformerBlock")
def diffusion_unet() -> Subject:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        8, 4, 4, block_out_channels=(16, 32), norm_num_groups=4, cross_attention_dim=16, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return Subject(
        model, lambda m, step: size(m(numbers(step, 2, 4, 8, 8), torch.tensor([3, 9]), numbers(step, 2, 5, 16)).sample)
    )


@zoo("byol-pytorch==0.9.1", "torchvision accelerate einops beartype")
def byol() -> Subject:
    """A second network without gradients, made at the first forward."""
    from byol_pytorch import BYOL

    network = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 8), nn.Linear(8, 4))
    learner = BYOL(network, 32, hidden_layer=-2, projection_size=8, projection_hidden_size=16, use_momentum=False)
    learner(numbers(0, 2, 3, 32, 32))
    return Subject(learner, lambda m, step: m(numbers(step, 8, 3, 32, 32)))


@zoo("e2cnn==0.2.3", "scipy sympy", blocks="R2Conv")
def rotations() -> Subject:
    """Filters that forward computes from weights, and keeps in a buffer when it evaluates."""
    from e2cnn import gspaces
    from e2cnn import nn as equivariant

    plane = gspaces.Rot2dOnR2(4)
    given, hidden = (
        equivariant.FieldType(plane, n * [r]) for n, r in ((3, plane.trivial_repr), (2, plane.regular_repr))
    )

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.last(m.relu(m.first(equivariant.GeometricTensor(x, given)))).tensor

    first, last = equivariant.R2Conv(given, hidden, 3, padding=1), equivariant.R2Conv(hidden, given, 3)
    model = Assembled(forward, first=first, relu=equivariant.ReLU(hidden), last=last)
    return Subject(model, of_numbers(2, 3, 9, 9))


@zoo("memcnn==1.5.2")
def reversible_blocks() -> Subject:
    """Blocks that keep no inputs: backward computes them again."""
    from memcnn import AdditiveCoupling, InvertibleModuleWrapper

    def block() -> nn.Module:
        halves = [nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh()) for _ in range(2)]
        return InvertibleModuleWrapper(AdditiveCoupling(*halves), keep_input=False)

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        for each in m.blocks:
            x = each(x)
        return x

    blocks = nn.ModuleList(block() for _ in range(2))
    return Subject(Assembled(forward, stem=nn.Conv2d(3, 4, 3), blocks=blocks), of_images(8))


# -- codebooks, spikes


def codebook(**options: Any) -> Subject:
    from vector_quantize_pytorch import VectorQuantize

    def forward(m: Any, x: Tensor) -> Tensor:
        codes, _, commitment = m.codes(m.before(x))
        return m.after(codes).square().mean() + commitment.sum()

    codes = VectorQuantize(dim=8, codebook_size=16, **options)
    model = Assembled(forward, before=nn.Linear(8, 8), after=nn.Linear(8, 8), codes=codes)
    return Subject(model, lambda m, step: m(numbers(step, 2, 5, 8)))


CODEBOOK = "einops einx torch-einops-utils"


@zoo("vector-quantize-pytorch==1.32.0", CODEBOOK, blocks="VectorQuantize")
def averaged_codebook() -> Subject:
    return codebook(decay=0.8, commitment_weight=1.0)


@zoo("vector-quantize-pytorch==1.32.0", CODEBOOK, blocks="VectorQuantize")
def own_optimizer_codebook() -> Subject:
    """A step of an optimizer of the codebook's own inside of forward."""
    return codebook(
        learnable_codebook=True, ema_update=False, in_place_codebook_optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )


@zoo("spikingjelly==2.0.0", "scipy tqdm matplotlib einops")
def spiking() -> Subject:
    """State from call to call, reset before each."""
    from spikingjelly.activation_based import functional, layer, neuron

    model = nn.Sequential(layer.Linear(8, 16), neuron.LIFNode(), layer.Linear(16, 4), neuron.IFNode())

    def loss(m: Any, step: int) -> Tensor:
        functional.reset_net(m)
        return size(sum(m(3 * numbers(step + t, 5, 8)) for t in range(3)))

    return Subject(model, loss)


# -- equations


@zoo("torchdiffeq==0.2.5", "scipy")
def adjoint_equation() -> Subject:
    """An adjoint asks for gradients of parameters inside of backward."""
    from torchdiffeq import odeint_adjoint

    def forward(m: Any, x: Tensor) -> Tensor:
        asked = tuple(m.net.parameters())
        path = odeint_adjoint(lambda t, y: m.net(y), x, torch.tensor([0.0, 0.5]), method="rk4", adjoint_params=asked)
        return m.head(path[-1])

    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    return Subject(Assembled(forward, net=net, head=nn.Linear(4, 2)), of_numbers(3, 4))


@zoo("torchdeq==0.1.0", "scipy")
def equilibrium() -> Subject:
    from torchdeq import get_deq

    def forward(m: Any, x: Tensor) -> Tensor:
        given = m.inject(x)
        found, _ = m.solver(lambda z: torch.tanh(m.cell(z) + given), torch.zeros(len(x), 8))
        return m.head(found[-1])

    solver = get_deq(f_solver="fixed_point_iter", f_max_iter=20, b_solver="fixed_point_iter", b_max_iter=20)
    model = Assembled(forward, cell=nn.Linear(8, 8), inject=nn.Linear(4, 8), head=nn.Linear(8, 2), solver=solver)
    nn.init.normal_(model.cell.weight, std=0.1)
    return Subject(model, of_numbers(3, 4))


@zoo("neuraloperator==2.0.0", "tensorly tensorly-torch opt_einsum scipy requests", blocks="FNOBlocks")
def fourier_operator() -> Subject:
    """Complex parameters."""
    from neuralop.models import FNO

    return Subject(
        FNO(n_modes=(4, 4), hidden_channels=8, in_channels=1, out_channels=1, n_layers=2), of_numbers(2, 1, 8, 8)
    )


@zoo("e3nn==0.6.0", "opt_einsum_fx sympy scipy")
def equivariant_network() -> Subject:
    """Scripted, generated modules."""
    from e3nn import nn as enn
    from e3nn import o3

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.last(m.gate(m.first(x[:, :10], x[:, 10:])))

    first = o3.FullyConnectedTensorProduct("4x0e+2x1o", "1x0e+1x1o", "4x0e+2x1o")
    gate, last = enn.NormActivation("4x0e+2x1o", torch.sigmoid), o3.Linear("4x0e+2x1o", "3x0e")
    return Subject(Assembled(forward, first=first, gate=gate, last=last), of_numbers(5, 14))


@zoo("torchani==2.9.0", "typing_extensions requests")
def molecule_forces() -> Subject:
    """Forces: the slope of an energy by autograd.grad, whose gradient trains the model."""
    from torchani.aev import AEVComputer
    from torchani.nn import ANINetworks, AtomicNetwork

    def forward(m: Any, places: Tensor) -> tuple[Tensor, Tensor]:
        kinds = torch.tensor([[1, 0, 0]])
        places = places.requires_grad_()
        energy = m.energies(kinds, m.aev(kinds, places)).sum()
        return energy, -torch.autograd.grad(energy, places, create_graph=True)[0]

    def loss(m: Any, step: int) -> Tensor:
        energy, forces = m(torch.tensor([[[0.0, 0, 0], [0.9, 0, 0], [0, 0.9, 0]]]) + 0.05 * numbers(step, 1, 3, 3))
        return (energy - 1).square() + forces.square().mean()

    aev = AEVComputer.like_2x(num_species=2)
    nets = {name: AtomicNetwork((aev.out_dim, 16, 1)) for name in ("H", "O")}
    return Subject(Assembled(forward, aev=aev, energies=ANINetworks(nets)), loss)


# -- probabilities


@zoo("normflows==1.7.3", "scipy")
def spline_flow() -> Subject:
    """The loss is a method, not the model's call."""
    import normflows

    flows = [
        f
        for _ in range(2)
        for f in (normflows.flows.AutoregressiveRationalQuadraticSpline(4, 1, 8), normflows.flows.LULinearPermute(4))
    ]
    model = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(4), flows)
    return Subject(model, lambda m, step: m.forward_kld(numbers(step, 5, 4)))


@zoo("zuko==1.6.0")
def spline_autoregression() -> Subject:
    """The call returns a distribution."""
    import zuko

    model = zuko.flows.NSF(4, context=2, transforms=2, hidden_features=(8, 8))
    return Subject(model, lambda m, step: -m(numbers(step, 5, 2)).log_prob(numbers(step + 9, 5, 4)).mean())


@zoo("gpytorch==1.15.2", "linear-operator jaxtyping scikit-learn")
def exact_process() -> Subject:
    """Trained, and after each step asked for a prediction under no_grad, which reads parameters."""
    import gpytorch

    x, y = numbers(0, 9, 2), numbers(1, 9)

    class Process(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(ard_num_dims=2))

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def loss(m: Any, step: int) -> Tensor:
        m.eval()
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            seen = m(numbers(step, 3, 2)).mean.sum()
        m.train()
        return seen.detach() - gpytorch.mlls.ExactMarginalLogLikelihood(m.likelihood, m)(m(x), y)

    return Subject(Process(), loss)


@zoo("blitz-bayesian-pytorch==0.2.8")
def bayesian_layers() -> Subject:
    from blitz.modules import BayesianLinear
    from blitz.utils import variational_estimator

    @variational_estimator
    class Bayesian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = BayesianLinear(4, 8), BayesianLinear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu())

    return Subject(
        Bayesian(), lambda m, step: m.sample_elbo(numbers(step, 5, 4), numbers(step + 9, 5, 1), nn.MSELoss(), 2)
    )


@zoo("hypnettorch==0.0.4", "scipy matplotlib")
def hypernetwork() -> Subject:
    """One network's output is the other's weights."""
    from hypnettorch.hnets import HMLP
    from hypnettorch.mnets import MLP

    main = MLP(n_in=4, n_out=2, hidden_layers=[6], no_weights=True, verbose=False)
    model = HMLP(main.param_shapes, uncond_in_size=0, cond_in_size=4, layers=[8], num_cond_embs=2, verbose=False)

    def loss(m: Any, step: int) -> Tensor:
        return size(main(numbers(step, 5, 4), weights=m(cond_id=step % 2)))

    return Subject(model, loss)


# -- tables, graphs, series


GRAPHS = "scipy tqdm requests jinja2 psutil pyparsing aiohttp fsspec xxhash"


def edges(step: int) -> Tensor:
    return words(step, 2, 20, below=6)


@zoo("torch-geometric==2.8.1", GRAPHS)
def cached_graph_convolution() -> Subject:
    """A cache that the first forward fills."""
    from torch_geometric.nn import GCN

    return Subject(GCN(4, 8, 2, 3, cached=True), lambda m, step: size(m(numbers(step, 6, 4), edges(0))))


@zoo("torch-geometric==2.8.1", GRAPHS, blocks="HGTConv")
def heterogeneous_graph() -> Subject:
    from torch_geometric.nn import HGTConv, Linear

    relations = [("a", "to", "b"), ("b", "from", "a")]

    def forward(m: Any, step: int) -> Tensor:
        nodes = {"a": numbers(step, 6, 4), "b": numbers(step + 9, 6, 4)}
        return m.last(m.first(nodes, {r: edges(step) for r in relations})["a"])

    model = Assembled(forward, first=HGTConv({"a": 4, "b": 4}, 8, (["a", "b"], relations), 2), last=Linear(-1, 2))
    model(0)  # its last layer is lazy
    return Subject(model, lambda m, step: size(m(step)))


@zoo("pykan==0.2.8", "matplotlib scikit-learn sympy tqdm pandas pyyaml")
def kan() -> Subject:
    """Keeps activations of all layers in attributes, from which its penalty is made."""
    from kan import KAN

    model = KAN(width=[2, 4, 1], grid=3, k=3, seed=0, auto_save=False)

    def loss(m: Any, step: int) -> Tensor:
        y = m(numbers(step, 7, 2))
        return size(y) + 0.01 * m.reg("edge_forward_spline_n", 1.0, 2.0, 0.0, 0.0)

    return Subject(model, loss)


@zoo("pytorch-crf==0.7.2")
def crf() -> Subject:
    from torchcrf import CRF

    def forward(m: Any, tokens: Tensor, tags: Tensor) -> Tensor:
        return -m.crf(m.out(m.lstm(m.embed(tokens))[0]), tags)

    lstm, crf = nn.LSTM(8, 8, batch_first=True), CRF(3, batch_first=True)
    model = Assembled(forward, embed=nn.Embedding(32, 8), lstm=lstm, out=nn.Linear(8, 3), crf=crf)
    return Subject(model, lambda m, step: m(words(step, 2, 6), words(step, 2, 6, below=3)))


# -- parameters that are more than weights


@zoo("geotorch==0.4.0")
def orthogonal_weights() -> Subject:
    import geotorch

    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    geotorch.orthogonal(model[0], "weight")
    geotorch.low_rank(model[2], "weight", rank=2)
    return Subject(model, of_numbers(5, 6))


@zoo("geoopt==0.5.1", "scipy")
def riemannian_adam() -> Subject:
    """An optimizer that needs the class of its parameters."""
    import geoopt

    def forward(m: Any, chosen: Tensor) -> Tensor:
        return m.head(m.ball.logmap0(m.ball.projx(m.points[chosen])))

    ball = geoopt.PoincareBall()
    points = geoopt.ManifoldParameter(0.1 * numbers(0, 6, 4), manifold=ball)
    return Subject(
        Assembled(forward, ball=ball, head=nn.Linear(4, 2), points=points),
        lambda m, step: size(m(words(step, 5, below=6))),
        lambda m: geoopt.optim.RiemannianAdam(m.parameters(), lr=1e-2),
    )


@zoo("higher==0.2.1")
def inner_loop() -> Subject:
    """A copy of the model is trained inside of the loss, and the loss differentiated through that."""
    import higher

    def loss(m: Any, step: int) -> Tensor:
        inner = torch.optim.SGD(m.parameters(), lr=0.1)
        with higher.innerloop_ctx(m, inner, copy_initial_weights=False) as (learner, optimizer):
            optimizer.step(size(learner(numbers(step, 5, 4))))
            return size(learner(numbers(step + 9, 5, 4)))

    return Subject(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), loss)


@zoo("ema-pytorch==0.8.3", "torch-einops-utils")
def moving_average() -> Subject:
    """An average of the values, updated and asked after each step."""
    from ema_pytorch import EMA

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    average = EMA(model, beta=0.9, update_every=1, update_after_step=0, include_online_model=False)

    def loss(m: Any, step: int) -> Tensor:
        average.update()
        with torch.no_grad():
            target = average(numbers(step, 5, 4))
        return (m(numbers(step, 5, 4)) - target).square().mean() + size(m(numbers(step + 9, 5, 4)))

    average.update()  # the first update copies the model
    return Subject(model, loss)
