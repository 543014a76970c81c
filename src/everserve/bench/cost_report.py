"""`bench cost` as a table: predicted and measured stalls beside each other."""

import statistics
from pathlib import Path
from typing import Any

from everserve.bench import cost_model, report
from everserve.bench.cost_model import RECOVERIES, Costs


def show(result: dict[str, Any], path: Path) -> None:
    costs, settings = Costs(**result["costs"]), result["settings"]
    rows = []
    for recovery in RECOVERIES:
        for token in settings["tokens"]:
            found = [p for p in result["points"] if p["recovery"] == recovery and p["token"] >= token]
            found = [p for p in found if not any(token < other <= p["token"] for other in settings["tokens"])]
            if not found:
                continue
            at = round(statistics.median(p["token"] for p in found))
            predicted = cost_model.stall_s(costs, recovery, settings["num_prompt"], at)
            stalls = [p["stall_s"] for p in found]
            rows.append(
                [
                    recovery,
                    str(at),
                    _ms(predicted),
                    _ms(statistics.median(stalls)),
                    _ms(max(stalls)),
                    f"{statistics.median(p['recomputed'] for p in found):.0f}",
                ]
            )
    columns = ["recovery", "token", "predicted", "stall, median", "worst", "tokens computed again"]
    title = f"A death at a token, {settings['num_streams']} streams, prompts of {settings['num_prompt']}"
    report.print_table(f"{title}: {result['model']}", columns, rows)
    print(
        f"T_w {costs.start_s:.2f} s, t_dec {1e3 * costs.step_s:.2f} ms, T_det {1e3 * costs.detect_s:.1f} ms,"
        f" T_pre(n) = {1e3 * costs.prefill_s:.1f} ms + {1e6 * costs.prefill_token_s:.0f} us n,"
        f" T_copy(n) = {1e6 * costs.copy_token_s:.1f} us n"
    )
    verdict = "all exact" if not result["num_wrong"] else f"{result['num_wrong']} NOT EXACT"
    print(f"{len(result['points'])} kills, streams: {verdict}")
    print(f"written to {path}")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
