"""Random integers for probes: reproducible from a seed, on any device."""

import torch

SIX = 7  # the code of magnitude 6
ALL_CODES = (1, 2, 3, 4, 5, 6, 7)
BINADE = tuple(range(8, 16))  # one full E4M3 binade, in eighths


class Draw:
    """Random integers on one device, reproducible from the seed on devices of the same type."""

    def __init__(self, seed: int, device: torch.device | str):
        self.device = torch.device(device)
        self.generator = torch.Generator(device=self.device).manual_seed(seed)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def choice(self, values: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Entries of `values`, drawn evenly."""
        return torch.tensor(values, device=self.device)[self.integers(0, len(values), shape)]

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        """float32, standard normal."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def permutation(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self.generator, device=self.device)

    def orders(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A random permutation of the last dimension for each leading index."""
        return torch.rand(shape, generator=self.generator, device=self.device).argsort(-1)

    def sign_bits(self, shape: tuple[int, ...]) -> torch.Tensor:
        """0 or 8, the sign bit of an E2M1 code."""
        return self.integers(0, 2, shape) * 8

    def powers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        """float64 powers of two with exponents in [low, high)."""
        return torch.exp2(self.integers(low, high, shape).double())
