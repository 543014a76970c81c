"""What a layer costs for each rank that could exist (`Capacity.max_workers`), whether it does or not.

`python -m tests.gpu.measure_peers`: microseconds per layer of the parts of both ends that are made for all ranks, in
graphs, for a growing number of ranks of which two exist. Prints a table; checks nothing.
"""

from collections.abc import Callable

import torch

from everserve.backends.cuda.lanes import send, serve
from everserve.backends.cuda.lanes.lane import FLAG_AT, CudaLaneShape
from everserve.memory.device import Driver, Region

SHAPE = CudaLaneShape(max_tokens=64, top_k=8, hidden_size=2048, num_slots=32)
NUM_RANKS = (2, 4, 8, 16, 24, 32)
NUM_LAYERS, NUM_EXPERTS, REPEATS, ROUNDS = 48, 128, 64, 20


def microseconds(stream: torch.cuda.Stream, launch: Callable[[], None]) -> float:
    """Of one launch, among many in a graph; the best of some rounds."""
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(REPEATS):
            launch()
    times = []
    with torch.cuda.stream(stream):
        for _ in range(ROUNDS):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) * 1e3 / REPEATS)
    return min(times)


def main() -> None:
    torch.set_grad_enabled(False)
    device = torch.zeros(1, device="cuda").device
    driver, stream = Driver(), torch.cuda.Stream()
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    x_TD = torch.zeros(SHAPE.max_tokens, SHAPE.hidden_size, dtype=torch.bfloat16, device=device)
    ids_TK = torch.full((SHAPE.max_tokens, SHAPE.top_k), -1, dtype=torch.int32, device=device)
    weights_TK = torch.zeros(SHAPE.max_tokens, SHAPE.top_k, device=device)
    print("ranks   wait   plan + post + collect   choose + gather   (us per layer)")
    for num_ranks in NUM_RANKS:
        region = Region(driver, num_ranks, SHAPE.lane_bytes())
        flags = [region.address(rank) + FLAG_AT for rank in range(num_ranks)]
        wait_us = microseconds(stream, lambda flags=flags: driver.wait_all_geq(stream.cuda_stream, flags, 0))

        sending = send.SendState.empty(SHAPE, region.base, num_ranks, zero)
        sending.present_E[:2] = 1
        nowhere_N = torch.full((NUM_EXPERTS,), -1, dtype=torch.int32, device=device)
        nowhere_P = torch.full((num_ranks * SHAPE.num_slots,), -1, dtype=torch.int32, device=device)

        def ask(sending=sending, nowhere_N=nowhere_N, nowhere_P=nowhere_P) -> None:
            y_row_TK = send.plan(sending, ids_TK, nowhere_N, nowhere_P, 0)
            send.post(sending, x_TD, y_row_TK, 1, 2)
            send.collect(sending, y_row_TK, weights_TK, x_TD.float(), 1)

        serving = serve.ServeState.empty(
            SHAPE, region.base, num_ranks, NUM_LAYERS, SHAPE.max_rows, zero, num_experts=NUM_EXPERTS
        )
        serving.healthy_A[:2] = 1
        serving.limits.copy_(torch.tensor([1, 0, 0]))

        def answer(serving=serving) -> None:
            serve.choose(serving)
            serve.gather(serving)

        ask_us, answer_us = microseconds(stream, ask), microseconds(stream, answer)
        print(f"{num_ranks:5}   {wait_us:4.2f}   {ask_us:21.2f}   {answer_us:15.2f}")
        region.close()


if __name__ == "__main__":
    main()
