"""Sources of the list of workers: Pods of a cluster (`pods`, `kube`), or a fixed list (`static`).

A source calls `apply` with all workers it knows, every time they change, and keeps the last list while it cannot ask.
"""
