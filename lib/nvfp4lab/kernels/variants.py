"""Ways of calling one kernel: plain, tuned, tuned for another M, captured in a CUDA graph, on many streams, every tactic.

Each gives kernels by label. All of them go through the same probe; the first that fails is the case's verdict.
"""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from nvfp4lab.errors import LabError
from nvfp4lab.kernels.backends.base import Backend, Launch, kernel_of, weights_key
from nvfp4lab.kernels.operands import Problem, take_rows
from nvfp4lab.kernels.poison import POISON_BYTE, poison_graph_memory
from nvfp4lab.kernels.reference import Kernel

STREAMS, ROUNDS = 4, 8
Kernels = Iterator[tuple[str, Kernel]]


def kernels(backend: Backend, variant: str, problem: Problem) -> Kernels:
    """(label, kernel) of each way of calling `backend` that `variant` stands for. Raises LabError for an unknown one."""
    if variant not in _VARIANTS:
        raise LabError(f"no kernel variant {variant!r}; there are {', '.join(_VARIANTS)}")
    return _VARIANTS[variant](backend, problem)


def _plain(backend: Backend, problem: Problem) -> Kernels:
    yield "plain", kernel_of(backend)


def _autotune(backend: Backend, problem: Problem) -> Kernels:
    yield "autotune", _tuned(kernel_of(backend), lambda asked: asked)


def _off_bucket(backend: Backend, problem: Problem) -> Kernels:
    """Tuned on a third of the rows, then asked about all of them: a tactic from another bucket (flashinfer #3192)."""
    yield "off_bucket", _tuned(kernel_of(backend), lambda asked: take_rows(asked, slice(0, max(1, asked.out_shape[0] // 3))))


def _tuned(kernel: Kernel, tune_on: Callable[[Problem], Problem]) -> Kernel:
    seen: set[tuple[int, tuple[int, int]]] = set()

    def tuned(problem: Problem, out: torch.Tensor) -> torch.Tensor:
        from flashinfer.autotuner import autotune

        key = (weights_key(problem), problem.out_shape)
        if key not in seen:
            seen.add(key)
            sample = tune_on(problem)
            with autotune(True):
                kernel(sample, torch.empty(sample.out_shape, dtype=out.dtype, device=out.device))
        return kernel(problem, out)

    return tuned


def _cuda_graph(backend: Backend, problem: Problem) -> Kernels:
    prepared = _prepared_once(backend)
    yield "cuda_graph", lambda asked, out: replayed(backend.bind(prepared(asked), asked, out))


def replayed(launch: Launch) -> torch.Tensor:
    """What one replay of the launch, captured in a CUDA graph, writes into memory that was poisoned after the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = launch()
    result.fill_(float("nan") if result.is_floating_point() else POISON_BYTE)
    poison_graph_memory(graph)
    graph.replay()
    torch.cuda.synchronize()
    return result.clone()  # memory of the graph's own pool goes with the graph


def _streams(backend: Backend, problem: Problem) -> Kernels:
    """The same call on several streams at once, again and again; the first output that differs is the answer."""
    prepared = _prepared_once(backend)

    def concurrent(asked: Problem, out: torch.Tensor) -> torch.Tensor:
        outputs = [out, *(torch.full_like(out, float("nan")) for _ in range(STREAMS - 1))]
        launches = [backend.bind(prepared(asked), asked, output) for output in outputs]
        streams = [torch.cuda.Stream() for _ in outputs]
        first = launches[0]().clone()
        torch.cuda.synchronize()
        for _ in range(ROUNDS):
            results = []
            for stream, launch in zip(streams, launches, strict=True):
                with torch.cuda.stream(stream):
                    results.append(launch())
            torch.cuda.synchronize()
            for result in results:
                if not torch.equal(result, first):
                    return result
        return first

    yield "streams", concurrent


def _prepared_once(backend: Backend):
    kept: dict[int, tuple[Problem, object]] = {}

    def prepared(problem: Problem):
        key = weights_key(problem)
        if key not in kept:
            kept[key] = (problem, backend.prepare(problem))
        return kept[key][1]

    return prepared


def _tactics(backend: Backend, problem: Problem) -> Kernels:
    """Every tactic that FlashInfer's autotuner would consider, one after the other, each forced."""
    plain = kernel_of(backend)
    with _choices() as offered:
        plain(problem, torch.empty(problem.out_shape, dtype=problem.out_dtype, device=problem.device))
    for operation, tactics in offered.items():
        for runner, tactic in tactics:
            yield f"{operation}, {type(runner).__name__}, tactic {tactic}", _forced(plain, operation, runner, tactic)


@contextlib.contextmanager
def _choices():
    """Records, for each operation that asks the autotuner, the (runner, tactic) pairs that it could be given."""
    from flashinfer.autotuner import AutoTuner

    offered: dict[str, list] = {}
    original = AutoTuner.choose_one

    def choose(self, custom_op, runners, tuning_config, inputs, **kwargs):
        profile = self._generate_optimization_profiles(tuning_config, inputs)[0]
        offered[custom_op] = [(runner, tactic) for runner in runners for tactic in runner.get_valid_tactics(inputs, profile)]
        return original(self, custom_op, runners, tuning_config, inputs, **kwargs)

    with mock.patch.object(AutoTuner, "choose_one", choose):
        yield offered


def _forced(kernel: Kernel, operation: str, runner, tactic) -> Kernel:
    def forced(problem: Problem, out: torch.Tensor) -> torch.Tensor:
        from flashinfer.autotuner import AutoTuner

        original = AutoTuner.choose_one

        def choose(self, custom_op, runners, *rest, **kwargs):
            same = next((one for one in runners if type(one) is type(runner)), None)
            if custom_op != operation or same is None:
                return original(self, custom_op, runners, *rest, **kwargs)
            return same, tactic

        with mock.patch.object(AutoTuner, "choose_one", choose):
            return kernel(problem, out)

    return forced


_VARIANTS = {
    "plain": _plain,
    "tactics": _tactics,
    "autotune": _autotune,
    "off_bucket": _off_bucket,
    "cuda_graph": _cuda_graph,
    "streams": _streams,
}
