"""Student's t quantile, without scipy (which the base install does not have)."""

from __future__ import annotations

import math


def quantile(p: float, freedom: int) -> float:
    """Return t with P(T <= t) = p for Student's t with `freedom` degrees of freedom, p from 0.5 to below 1.

    Bisection on the distribution function, which is a regularised incomplete beta function:
    P(T > t) = I_x(freedom / 2, 1 / 2) / 2 with x = freedom / (freedom + t^2).
    """
    if not 0.5 <= p < 1 or freedom < 1:
        raise ValueError(f"p {p} and {freedom} degrees of freedom; expected 0.5 <= p < 1 and at least 1")
    low, high = 0.0, 1.0
    while 1 - _upper(high, freedom) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if 1 - _upper(middle, freedom) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _upper(t: float, freedom: int) -> float:
    return _beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2


def _beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c = 1.0
    d = 1 / max(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = fraction
        for term in (even, odd):
            d = 1 / ((1 + term * d) or tiny)
            c = (1 + term / c) or tiny
            fraction *= d * c
        if abs(fraction - before) <= 1e-16 * abs(fraction):
            break
    return math.exp(scale) * fraction / a
