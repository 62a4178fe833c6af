"""What a remat alone costs, shared by the rules."""

from jremat.check.sites import Site
from jremat.check.subject import of_site, work


def rerun_flops(site: Site) -> int:
    """FLOPs that a remat does again in one call of the whole; its body's work where JAX refuses its gradient."""
    try:
        return of_site(site).recomputed * site.repeats
    except NotImplementedError:
        return work(site.graph) * site.repeats


def kept_bytes(site: Site) -> int:
    """Bytes that a remat keeps in one call of the whole, by its own count."""
    return of_site(site).rows.total_bytes * site.repeats
