"""The router that DeepSeek-V3 began with: sigmoid scores, a correction of what is chosen, groups, a factor."""

from everserve.model.families.reading import num_layers
from everserve.model.fields import Fields
from everserve.model.spec import Router, Score


def corrected_router(f: Fields) -> Router:
    f.expect("scoring_func", "sigmoid")
    f.expect("topk_method", "noaux_tc")
    return Router(
        top_k=f.integer("num_experts_per_tok"),
        score=Score.SIGMOID,
        has_correction=True,
        num_groups=f.integer("n_group", 1),
        groups_kept=f.integer("topk_group", 1),
        renormalise=f.flag("norm_topk_prob", False),
        least_sum=1e-20,
        scale=f.number("routed_scaling_factor", 1.0),
    )


def dense_first(f: Fields) -> list[bool]:
    """Which layers have experts, where a file says how many at the beginning have not."""
    first = f.integer("first_k_dense_replace", 0, minimum=0)
    step = f.integer("moe_layer_freq", 1)
    return [i >= first and i % step == 0 for i in range(num_layers(f))]
