"""Numbers as a reader wants them: four digits, thousands apart, the interval behind; never 1.041e+04."""

from nvfp4lab.records import Number


def digits(value: float) -> str:
    """Such as 0.02842, 231.5 or 10,411."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def interval(number: Number, with_unit: bool = True) -> str:
    """A number with its unit and, where there is one, its interval: "231.5 tok/s [192.9, 262.4]"."""
    bounds = "" if number.low is None or number.high is None else f"[{digits(number.low)}, {digits(number.high)}]"
    return " ".join(filter(None, (digits(number.value), number.unit if with_unit else "", bounds)))
