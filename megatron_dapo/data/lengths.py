"""The lengths of responses as a distribution: log-normal, cut at the longest allowed response.

Lengths of reasoning models have a long tail on one side, fitted in the middle by a log-normal. A
longer response is cut at `longest` and counts with that length, as on a server.
"""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

MEAN_SHARE = 0.3
"""Default mean length, as a share of the longest allowed response."""
SPREAD = 0.9
"""Default deviation of the logarithm of lengths."""
_NORMAL = NormalDist()
# largest spread: a wider one comes from two kinds of responses, short ones and cut ones
_WIDEST = 3.0
_STEPS = 60  # of the bisection: the median is exact to the last digits of a float


@dataclass(frozen=True)
class Lengths:
    """min(exp(N(log median, sigma)), longest), in tokens; with sigma 0 all have the same length."""

    median: float
    sigma: float
    longest: int

    @classmethod
    def with_mean(cls, mean: float, sigma: float, longest: int) -> "Lengths":
        """Return the distribution with this mean after the cut.

        Needs 0 < mean < longest, or mean = longest with sigma 0.
        """
        if not sigma:
            return cls(mean, 0.0, longest)
        low = math.log(mean) - sigma**2 / 2  # the median for this mean without the cut
        high = math.log(longest) + 8 * sigma + math.log(2)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if cls(math.exp(middle), sigma, longest).mean < mean:
                low = middle
            else:
                high = middle
        return cls(math.exp((low + high) / 2), sigma, longest)

    @classmethod
    def with_moments(cls, mean: float, mean_square: float, longest: int) -> "Lengths":
        """Return the distribution with this mean and this mean square after the cut.

        If no log-normal has both, it has this mean and the nearest spread. Needs 0 < mean <=
        longest.
        """
        if mean_square <= mean**2 or mean >= longest:
            return cls(mean, 0.0, longest)
        low, high = 0.0, _WIDEST
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if cls.with_mean(mean, middle, longest).mean_square < mean_square:
                low = middle
            else:
                high = middle
        return cls.with_mean(mean, (low + high) / 2, longest)

    def sample(self, source: random.Random) -> int:
        """Return one length, at least 1."""
        return min(max(round(source.lognormvariate(math.log(self.median), self.sigma)), 1), self.longest)

    @property
    def mean(self) -> float:
        """Return the mean number of tokens."""
        return self._moment(1)

    @property
    def mean_square(self) -> float:
        """Return the mean of the squared number of tokens: attention and caches grow with it."""
        return self._moment(2)

    @property
    def cut_share(self) -> float:
        """Return the share of responses of the longest allowed length."""
        return 1.0 - self._below(0) if self.sigma else float(self.median >= self.longest)

    def quantiles(self, number: int) -> tuple[int, ...]:
        """Return that many lengths, one for the middle of each equal share of all responses."""
        if not self.sigma:
            return (max(round(min(self.median, self.longest)), 1),) * number
        normal = NormalDist(math.log(self.median), self.sigma)
        values = (math.exp(normal.inv_cdf((i + 0.5) / number)) for i in range(number))
        return tuple(min(max(round(value), 1), self.longest) for value in values)

    def _moment(self, order: int) -> float:
        """Return E[X^order] of the cut log-normal, k = order, c = the cut (a partial expectation).

        Below the cut it is exp(k mu + k^2 sigma^2 / 2) Phi((log c - mu - k sigma^2) / sigma); the
        rest counts as c^k.
        """
        if not self.sigma:
            return min(self.median, self.longest) ** order
        whole = math.exp(order * math.log(self.median) + (order * self.sigma) ** 2 / 2)
        return whole * self._below(order) + self.longest**order * (1.0 - self._below(0))

    def _below(self, order: int) -> float:
        return _NORMAL.cdf(math.log(self.longest / self.median) / self.sigma - order * self.sigma)
