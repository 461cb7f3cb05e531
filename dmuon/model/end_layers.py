"""The input and output layers of a model in which no layer repeats, told by what its layers take and give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.nn as nn

from dmuon.model.makeup import EMBEDDINGS, INPUT_EMBEDDING, RECURRENT, Holder, Makeup

INPUT_LAYER, OUTPUT_LAYER = "input layer", "output layer"
_CHANNELS = 8  # images have fewer; of wider layers two may be joined, also where a decoder is registered first
SHARES = (2, 3, 4)  # a bare matrix may have so many times the features of a layer


@dataclass(frozen=True, slots=True)
class Layer:
    """One use of a weight.

    Attributes:
        key: the same for layers that share a weight.
        takes, gives: features, or channels.
        spatial: a convolution, of whose output a linear layer takes all positions at once.
    """

    key: int
    takes: int
    gives: int
    spatial: bool

    @staticmethod
    def of(module: nn.Module, weight: nn.Parameter) -> Layer:
        """The layer that ``module`` is with this weight of two dimensions or more."""
        first, second = weight.shape[0], weight.shape[1]
        bias = getattr(module, "bias", None)
        transposed = first != second and getattr(bias, "shape", ()) == (second,)  # (in, out), as Conv1D of GPT-2
        takes, gives = (first, second) if transposed else (second, first)
        return Layer(
            id(weight),
            _size(module, ("in_features", "in_channels"), takes),
            _size(module, ("out_features", "out_channels"), gives),
            weight.ndim > 2,
        )


def _size(module: nn.Module, names: Iterable[str], otherwise: int) -> int:
    sizes = (getattr(module, name, None) for name in names)
    return next((size for size in sizes if isinstance(size, int)), otherwise)


def layers_of(
    model: nn.Module,
    params: Sequence[tuple[str, nn.Parameter, Sequence[Holder]]],
    makeups: Mapping[int, Makeup],
    embeddings: Mapping[int, str],
) -> tuple[list[Layer], set[int], set[int]]:
    """What :func:`find_end_layers` asks for: layers in the order of the model, widths of embeddings, known heads."""
    order = {id(module): i for i, module in enumerate(model.modules())}
    layers: list[tuple[int, Layer]] = []
    embedded: set[int] = set()
    heads: set[int] = set()
    for _, param, sites in params:
        for module, _ in sites:
            if isinstance(module, RECURRENT):
                embedded |= {module.hidden_size, 2 * module.hidden_size}
            if isinstance(module, EMBEDDINGS):
                embedded.add(param.shape[-1])  # of an embedding of one's own, which may have vectors too
            elif param.ndim > 1 and makeups[id(param)].is_layer:
                layer = Layer.of(module, param)
                if embeddings.get(id(param)) == INPUT_EMBEDDING:
                    embedded.add(layer.gives)
                    continue
                layers.append((order[id(module)], layer))
                if id(param) in embeddings:
                    heads.add(id(param))
    return [layer for _, layer in sorted(layers, key=lambda item: item[0])], embedded, heads


def find_end_layers(layers: Sequence[Layer], embedded: Collection[int], heads: Collection[int]) -> dict[int, str]:
    """Which layers take what goes into a model, and which give what comes out of it.

    The output layer is the last one, unless others take what it gives, and it feeds one that feeds none. The input
    layer is the first whose features no other layer gives; where widths tell nothing, the first one. Layers beside
    them are of their kind: those that take as many features as the input layer, if nothing gives so many, and those
    that take as many as the output layer and give as many, or fewer than they take and a number met nowhere else.

    Args:
        layers: in the order of the model.
        embedded: widths of embeddings. A model that has some need not have an input layer.
        heads: keys of layers that are known to be output layers; if there are any, no other one is.

    Returns:
        ``"input layer"`` or ``"output layer"``, by key.
    """
    if not layers:
        return {}
    ends = dict.fromkeys(heads, OUTPUT_LAYER)
    last = _last(layers)
    if not heads:
        ends |= {layer.key: OUTPUT_LAYER for layer in layers if layer is last or _is_beside(layer, last, layers)}
    within = [layer for layer in layers if layer.key not in ends]
    first = _first(layers, within, embedded) or (None if embedded else layers[0])
    if first is not None:
        given = {layer.gives for layer in within} | set(embedded)
        ends = {
            layer.key: INPUT_LAYER
            for layer in layers
            if layer is first or (layer.takes == first.takes and layer.takes not in given)
        } | ends
    return ends


def find_input_convolution(layers: Sequence[Layer], embedded: Collection[int]) -> dict[int, str]:
    """The same for the first layer alone, if it is a convolution; for stacks, of which it may be a part."""
    if not any(layer.spatial for layer in layers):
        return {}
    last = _last(layers)
    within = [layer for layer in layers if layer is not last]
    first = _first(within, within, embedded)
    return {} if first is None or not first.spatial else {first.key: INPUT_LAYER}


def _last(layers: Sequence[Layer]) -> Layer:
    taken, end = Counter(layer.takes for layer in layers), layers[-1]
    unused = [layer for layer in layers if taken[layer.gives] == (layer.takes == layer.gives)]
    fitting = [] if end in unused else [layer for layer in unused if layer.takes == end.gives]
    return (fitting or [end])[-1]


def _first(layers: Sequence[Layer], givers: Sequence[Layer], embedded: Collection[int]) -> Layer | None:
    """The first layer whose features no other one of ``givers`` gives, nor two alike, nor embeddings side by side."""
    given = Counter(layer.gives for layer in givers)
    for layer in layers:
        n = layer.takes
        others = given[n] - (layer in givers and layer.gives == n)
        joined = given[n // 2] if n >= _CHANNELS and n % 2 == 0 else 0
        if not (others or joined) and all(n % width for width in embedded if width > 1):
            return layer
    return None


def _is_beside(layer: Layer, last: Layer, layers: Sequence[Layer]) -> bool:
    if layer.takes != last.takes:
        return False
    if layer.gives == last.gives:
        return layer.gives != layer.takes
    others = {size for other in layers if other is not layer for size in (other.takes, other.gives)}
    return layer.gives < layer.takes and layer.gives not in others


def with_known_widths(
    bare: Sequence[tuple[str, nn.Parameter]], widths: Collection[int]
) -> list[tuple[str, nn.Parameter]]:
    """Those that lead from features to features: others may be tables of positions, or states.

    Args:
        widths: of layers. So many features have bare matrices as well, if several have them.
    """
    sides = {(fqn.rpartition(".")[2], side) for fqn, param in bare for side in param.shape[-2:]}
    shared = {side for side, count in Counter(side for _, side in sides).items() if count > 1}
    known = shared.union(*({width * share for share in (1, *SHARES)} for width in widths))
    return [(fqn, param) for fqn, param in bare if known.issuperset(param.shape[-2:])]
