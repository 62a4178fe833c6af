"""Show it: what a policy keeps and makes again, value by value, as tables, pictures and a page."""
