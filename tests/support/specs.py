"""Models that differ in one thing from one that there is."""

from dataclasses import replace

from everserve.model.config import ModelConfig
from everserve.model.spec import Dense, Experts, LayerSpec


def resized(config: ModelConfig, **changes: int) -> ModelConfig:
    """With other fields of its spec."""
    return replace(config, spec=replace(config.spec, **changes))


def with_layers(config: ModelConfig, *layers: LayerSpec) -> ModelConfig:
    return replace(config, spec=replace(config.spec, layers=layers))


def with_mixers(config: ModelConfig, **changes: object) -> ModelConfig:
    """The attention of all layers differs."""
    return with_layers(config, *(replace(one, mixer=replace(one.mixer, **changes)) for one in config.layers))


def with_experts(config: ModelConfig, **changes: object) -> ModelConfig:
    """The experts of all layers that have some differ; `top_k` is the router's."""

    def changed(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.ffn, Experts):
            return layer
        router = replace(layer.ffn.router, **{name: changes[name] for name in changes.keys() & {"top_k"}})
        others = {name: value for name, value in changes.items() if name != "top_k"}
        return replace(layer, ffn=replace(layer.ffn, router=router, **others))

    return with_layers(config, *map(changed, config.layers))


def some_dense(config: ModelConfig, *sparse: int, size: int = 96) -> ModelConfig:
    """Only these layers have experts."""
    dense = Dense(size=size)
    layers = (layer if i in sparse else replace(layer, ffn=dense) for i, layer in enumerate(config.layers))
    return with_layers(config, *layers)
