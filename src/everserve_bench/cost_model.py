"""What a failure costs, as a function of where it strikes: the token i that is being decoded, and the layer l of it.

    recovery     what is done                                               stall
    restart      everything is started again, clients ask from the prompt   T_w + T_pre(P) + (i - 1 + l/L) t_dec
    re-prefill   a survivor computes all known tokens again, as a prompt    T_det + T_pre(P + i)
    log          a survivor copies the stream's KV, and repeats one step    T_det + T_copy(P + i) + t_dec

T_w is the time to start an instance, t_dec the time of one decoding step, L the number of layers, P the length of the
prompt. T_pre(n) is the time to compute n tokens as a prompt, T_det the time until survivors are told of a death. The
re-executed work is counted in tokens: i + P after a restart and a re-prefill, none with a log.
"""

from dataclasses import dataclass

RESTART, REPREFILL, LOG = "restart", "re-prefill", "log"
RECOVERIES = (RESTART, REPREFILL, LOG)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured on the instance whose failures are predicted, in seconds."""

    start_s: float  # T_w
    step_s: float  # t_dec
    detect_s: float  # T_det
    prefill_s: float  # T_pre(n) = prefill_s + prefill_token_s * n, for all streams of a worker together
    prefill_token_s: float
    copy_token_s: float  # T_copy(n) = copy_token_s * n

    def prefill(self, num_tokens: int) -> float:
        return self.prefill_s + self.prefill_token_s * num_tokens


def stall_s(costs: Costs, recovery: str, num_prompt: int, token: int, layer_share: float = 0.5) -> float:
    """The longest gap of a stream whose worker dies while it decodes this token, `layer_share` through its layers."""
    if recovery == RESTART:
        return costs.start_s + costs.prefill(num_prompt) + (token - 1 + layer_share) * costs.step_s
    if recovery == REPREFILL:
        return costs.detect_s + costs.prefill(num_prompt + token)
    assert recovery == LOG, recovery
    return costs.detect_s + costs.copy_token_s * (num_prompt + token) + (1 + layer_share) * costs.step_s


def recomputed_tokens(recovery: str, num_prompt: int, token: int) -> int:
    return 0 if recovery == LOG else num_prompt + token


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(at 0, slope) of the straight line through two points; the slope is not negative."""
    (x0, y0), (x1, y1) = points
    slope = max(0.0, (y1 - y0) / (x1 - x0))
    return max(0.0, y0 - slope * x0), slope
