"""The route of one `--fp4-gemm-backend` value: the linear method's weight preparation and its GEMM."""

import dataclasses

from nvfp4lab.source.routes_layers import QuantClasses, apply_of, method
from nvfp4lab.source.routes_query import Query
from nvfp4lab.source.routes_walk import Walk, Walker
from nvfp4lab.source.sglang.reading import Reading
from nvfp4lab.source.values import EnumValue, Self

FIELD = "fp4_gemm_runner_backend"
_LOADING = ("__init__", "create_weights", "process_weights_after_loading")


@dataclasses.dataclass(eq=False)
class DenseTracer:
    """Traces the dense FP4 GEMM of one quantisation in one SGLang."""

    reading: Reading
    classes: QuantClasses

    def trace(self, query: Query, backend: str) -> Walk:
        """Walk one backend value from the linear method's constructor to its GEMM."""
        walk = Walk()
        walker = Walker(self.reading, query.scenario(**{FIELD: backend}), walk)
        owner = Self(self.classes.linear)
        for name in (*_LOADING, "apply"):
            found = (apply_of if name == "apply" else method)(self.reading, self.classes.linear, name)
            if found is None or walk.refusal is not None:
                continue
            kernels = len(walk.kernels)
            walker.enter(found, {"self": owner})
            if name != "apply":
                del walk.kernels[kernels:]
            else:
                walk.hop(found.file, found.line, f"{found.scope} runs the GEMM")
        return walk

    def flashinfer_name(self, backend: str) -> str | None:
        """The word that SGLang passes to FlashInfer as `backend=`; None where the enum has no such method."""
        enum = self.reading.vocabulary.enums.get("fp4_gemm")
        found = enum.methods.get("get_flashinfer_backend") if enum else None
        if found is None:
            return None
        answer = self.reading.evaluator(Query("12.0").scenario()).returned(found, {"self": EnumValue(enum.name, backend)})
        return answer if isinstance(answer, str) else None
