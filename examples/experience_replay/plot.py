"""The plot of a comparison, as SVG text: one thin line per seed, a thick one for their mean."""

from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 24, 44, 52
STYLES = {"with replay": ("#0b6e4f", ""), "without replay": ("#b5482a", "6 4")}  # colour, dashes
TEXT = 'font-family="sans-serif" font-size="13" fill="#333"'

Curve = Sequence[tuple[int, float]]


def draw(results: dict) -> str:
    """Return the plot as SVG. results: compare.py's; all curves have the same steps."""
    curves = results["curves"]
    last = max(step for runs in curves.values() for curve in runs.values() for step, _ in curve)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_axes(last),
        _line([(0, results["goal"]), (last, results["goal"])], last, "#888", 1, "2 3"),
    ]
    for place, (arm, (colour, dashes)) in enumerate(STYLES.items()):
        runs = list(curves[arm].values())
        parts += [_line(curve, last, colour, 1, dashes, opacity=0.45) for curve in runs]
        parts.append(_line(_mean(runs), last, colour, 3, dashes))
        x, y = LEFT + 14, TOP + 16 + 20 * place
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 34}" y2="{y}" {_stroke(colour, 3, dashes)}/>')
        parts.append(f'<text x="{x + 42}" y="{y + 4}" {TEXT}>{arm}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(last: int) -> list[str]:
    marks = [x for x in range(0, last + 1, 5 if last <= 50 else 20)]
    lines = [_line([(0, share / 4), (last, share / 4)], last, "#ddd", 1) for share in range(5)]
    lines += [_label(_x(mark, last), HEIGHT - BOTTOM + 20, str(mark)) for mark in marks]
    lines += [_label(LEFT - 24, _y(share / 4) + 4, f"{25 * share} %") for share in range(5)]
    lines.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "rollout steps"))
    lines.append(_label(WIDTH / 2, 24, "Right answers to 32 sums, sampled as in training; thick: mean of the seeds"))
    return lines


def _mean(runs: Sequence[Curve]) -> Curve:
    return [(points[0][0], sum(share for _, share in points) / len(points)) for points in zip(*runs, strict=True)]


def _x(step: float, last: int) -> float:
    return LEFT + step / last * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _line(curve: Curve, last: int, colour: str, width: int, dashes: str = "", opacity: float = 1.0) -> str:
    points = " ".join(f"{_x(step, last):.1f},{_y(share):.1f}" for step, share in curve)
    return f'<polyline points="{points}" fill="none" opacity="{opacity:g}" {_stroke(colour, width, dashes)}/>'


def _stroke(colour: str, width: int, dashes: str) -> str:
    return f'stroke="{colour}" stroke-width="{width}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" {TEXT}>{text}</text>'
