"""What a function computes, keeps and costs."""

from jremat.graph.flops import FlopCount, Flops, flops
from jremat.graph.graph import Graph, Op, Value
from jremat.graph.residuals import Residual, Residuals
from jremat.graph.trace import trace

__all__ = ["FlopCount", "Flops", "Graph", "Op", "Residual", "Residuals", "Value", "flops", "trace"]
