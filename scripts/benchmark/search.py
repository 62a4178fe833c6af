"""The largest batch that fits, with few compiles."""

from collections.abc import Callable


def largest_that_fits(
    peak_bytes: Callable[[int], int], limit_bytes: int, start: int, step: int = 1, probes: int = 16
) -> int:
    """The largest multiple of ``step`` whose program fits.

    Memory grows about linearly with the batch, so the next probe is where a line through the last two would reach the
    limit; probes that fit and that don't close in from both sides until they are ``step`` apart.

    Args:
        peak_bytes: of a batch; each call is a compile.
        limit_bytes: to fit in.
        start: the first batch tried.
        step: the devices that share a batch.
        probes: at most so many calls; the largest batch known to fit is returned then.

    Returns:
        The batch, or 0 where not even ``step`` fits.

    >>> tried = []
    >>> largest_that_fits(lambda b: (tried.append(b), 10 + 3 * b)[1], limit_bytes=100, start=4)
    30
    >>> tried
    [4, 8, 30, 31]
    """
    fits, too_large = 0, 0
    known: dict[int, int] = {}
    batch = max(step, start // step * step)
    for _ in range(probes):
        known[batch] = peak_bytes(batch)
        if known[batch] <= limit_bytes:
            fits = max(fits, batch)
        else:
            too_large = min(too_large or batch, batch)
        if too_large and too_large - fits <= step:
            break
        batch = _next(known, limit_bytes, fits, too_large, step)
    return fits


def _next(known: dict[int, int], limit_bytes: int, fits: int, too_large: int, step: int) -> int:
    if not fits:
        return max(step, too_large // 2 // step * step)
    if len(known) < 2:
        return 2 * fits
    below, above = sorted(known)[-2:] if not too_large else sorted((fits, too_large))
    below, above = (below, above) if below in known and above in known else tuple(sorted(known)[:2])
    slope = (known[above] - known[below]) / (above - below)
    guess = int((limit_bytes - known[below]) / slope + below) // step * step if slope > 0 else 2 * above
    if too_large:
        return min(max(guess, fits + step), too_large - step)
    return fits + step if guess <= fits else guess
