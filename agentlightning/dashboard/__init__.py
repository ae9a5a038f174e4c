"""The page of a store server: its built files, and what it shows beyond the store's own operations.

The source of the page is in `dashboard/` at the root of the repository; `static/` here is what its build makes. A store
server takes this package through the hook in `agentlightning/store/http/mounts.py`.
"""
