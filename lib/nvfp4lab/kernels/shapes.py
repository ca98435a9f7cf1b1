"""Problem sizes as data, with the work that they imply."""

import dataclasses

from nvfp4lab.nvfp4.conventions import BLOCK_SIZE as BLOCK


@dataclasses.dataclass(frozen=True)
class GemmShape:
    """out[M, N] = activations[M, K] x weights[N, K]^T."""

    m: int
    n: int
    k: int

    op = "gemm"

    @property
    def label(self) -> str:
        return f"m{self.m}n{self.n}k{self.k}"

    @property
    def flops(self) -> float:
        """Multiplications and additions of one call."""
        return 2.0 * self.m * self.n * self.k

    def min_bytes(self, fp4_activations: bool) -> float:
        """Each operand and the 2-byte output moved once."""
        fp4_bytes = 0.5 + 1 / BLOCK
        return self.n * self.k * fp4_bytes + self.m * self.k * (fp4_bytes if fp4_activations else 2.0) + self.m * self.n * 2.0


@dataclasses.dataclass(frozen=True)
class MoeShape:
    """A gated fused MoE layer on one rank.

    tokens, hidden, intermediate: rows, model width and width of one expert on this rank (after a TP split).
    experts: experts that live on this rank; global ids [expert_offset, expert_offset + experts).
    experts_global: experts of the whole layer (after an EP split it is larger than `experts`); 0 means `experts`.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    expert_offset: int = 0
    experts_global: int = 0

    op = "moe"

    @property
    def all_experts(self) -> int:
        return self.experts_global or self.experts

    @property
    def label(self) -> str:
        split = f"off{self.expert_offset}of{self.experts_global}" if self.experts_global else ""
        return f"t{self.tokens}h{self.hidden}i{self.intermediate}e{self.experts}k{self.topk}{split}"

    @property
    def flops(self) -> float:
        """Of the pairs that an even router sends to this rank."""
        pairs = self.tokens * self.topk * self.experts / self.all_experts
        return 2.0 * pairs * self.hidden * self.intermediate * 3

    def min_bytes(self, fp4_activations: bool) -> float:
        """Weights of the experts that an even router touches, activations in and out once. A token asks top-k different ones."""
        touched = self.experts * (1 - (1 - self.topk / self.all_experts) ** self.tokens)
        fp4_bytes = 0.5 + 1 / BLOCK
        weights = touched * 3 * self.hidden * self.intermediate * fp4_bytes
        return weights + self.tokens * self.hidden * ((fp4_bytes if fp4_activations else 2.0) + 2.0)


@dataclasses.dataclass(frozen=True)
class QuantiseShape:
    """bf16 [M, K] -> FP4 codes and block scales."""

    m: int
    k: int

    op = "quantise"

    @property
    def label(self) -> str:
        return f"m{self.m}k{self.k}"

    @property
    def flops(self) -> float:
        """None that a tensor core would do; one comparison and one product a value, so that rates are finite."""
        return 2.0 * self.m * self.k

    def min_bytes(self, fp4_activations: bool) -> float:
        """Read once in bf16, written once as codes and scales."""
        return self.m * self.k * (2.0 + 0.5 + 1 / BLOCK)


Shape = GemmShape | MoeShape | QuantiseShape
SHAPES: dict[str, type[Shape]] = {kind.op: kind for kind in (GemmShape, MoeShape, QuantiseShape)}
