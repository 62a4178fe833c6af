"""Show it: what a policy keeps and recomputes, value by value, as tables, pictures and a page."""
