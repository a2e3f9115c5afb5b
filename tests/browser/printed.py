"""Numbers as the page prints them."""

MINUS = "\u2212"
THIN = "\u202f"  # between thousands


def number(value: float) -> str:
    """Four digits that count; powers of ten where zeros would hide them."""
    size = abs(value)
    if value == 0:
        return "0"
    if 9999.5 <= size < 1e7:
        text = whole(round(value))
    elif 1e-3 <= size < 1e4:
        text = f"{value:#.4g}".rstrip(".")
    else:
        digits, power = f"{value:.3e}".split("e")
        text = f"{digits}e{'-' if int(power) < 0 else '+'}{abs(int(power))}"
    return text.replace("-", MINUS)


def signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


def percent(share: float) -> str:
    return "<0.01 %" if 0 < share < 0.00005 else f"{100 * share:.2f} %"


def kept_percent(share: float) -> str:
    """Of a pattern, which a page keeps in steps of 0.0001."""
    return f"{round(share * 10_000) / 100:.2f} %"


def whole(value: int) -> str:
    return f"{value:,}".replace(",", THIN)
