"""Sizes of models that exist nowhere, from a few numbers."""

import math

from zero_offload.planning.model_sizes import WHOLE, ModelSizes, ParameterSizes, UnitSizes


def unit(name, numel, **options):
    return UnitSizes(name, (ParameterSizes(name, numel),), **options)


def transformer(
    *, layers, hidden_size, intermediate_size=None, vocab_size=0, gated=False, heads=None, sequence_length=0, tiles=1
):
    """Sizes of a decoder: 4 h^2 of attention and 2 (gated: 3) matrices of h x intermediate a layer.

    `tiles` cuts each layer into that many units, and embedding and head into as large ones, as zero_core.TiledLinear
    does. Activations per token are those of Korthikanti et al. 2022, equation 2: 34 h bytes a layer in 16 bits, and
    5 heads x sequence where attention scores are kept (`heads` given).
    """
    inner = 4 * hidden_size if intermediate_size is None else intermediate_size
    layer = 4 * hidden_size**2 + (3 if gated else 2) * hidden_size * inner
    block = [
        unit(f"layers.{i}" if tiles == 1 else f"layers.{i}.{t}", math.ceil(layer / tiles))
        for i in range(layers)
        for t in range(tiles)
    ]
    vocabulary = vocab_size * hidden_size
    pieces = 1 if tiles == 1 else math.ceil(vocabulary * tiles / layer)
    piece, count = math.ceil(vocabulary / max(1, pieces)), pieces if vocab_size else 0
    embedding = [unit(f"embedding.{i}", piece, matmul_numel=0, is_block=False) for i in range(count)]
    head = [unit(f"head.{i}", piece, is_block=False, is_head=tiles == 1) for i in range(count)]
    scores = 5 * heads * sequence_length if heads else 0
    return ModelSizes(
        units=(*embedding, *block, *head),
        checkpoint_bytes_per_token=math.ceil(2 * hidden_size / tiles),
        saved_bytes_per_token=math.ceil((34 * hidden_size + scores) / tiles),
        working_bytes_per_token=34 * hidden_size + scores,
        whole_bytes_per_token=WHOLE * hidden_size + scores,
        part_bytes_per_token=19 * hidden_size,
        output_bytes_per_token=6 * vocab_size,
    )
